//! Models on the Hugging Face Hub, through its own client and that client's cache.
//!
//! Which file of a repository is meant is decided here; what a good file is, by the card or the loader.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

use hf_hub::progress::{DownloadEvent, Progress, ProgressEvent, ProgressHandler};
use hf_hub::repository::{RepoTreeEntry, RepoTypeModel};
use hf_hub::{HFClient, HFRepositorySync, HFResult};

use super::{FetchProgress, ProgressSink, SourceError};

/// A repository and what of it is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HubId {
    owner: String,
    name: String,
    /// A file name or a quantisation.
    selector: Option<String>,
}

/// The Hub as the environment configures its client (endpoint, token, cache).
#[derive(Clone, Debug, Default)]
pub(super) struct Hub {
    /// Another endpoint and cache folder than the client's own; tests use it.
    place: Option<(String, PathBuf)>,
}

/// The first answer must come within this: a network that swallows packets would hold a user for minutes.
const FIRST_ANSWER: Duration = Duration::from_secs(10);
/// Later, something must arrive at least this often.
const STALL: Duration = Duration::from_secs(60);
/// One retry: without a network, more would only delay the next source.
const MAX_RETRIES: usize = 1;
/// Longest message of the client that an error repeats.
const MAX_MESSAGE_CHARS: usize = 300;

/// What a model folder needs.
const FOLDER_FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model*.safetensors*",
];

impl HubId {
    /// `owner/name`, `owner/name:FILE.gguf` or `owner/name:QUANTISATION`.
    pub(super) fn parse(spec: &str) -> Option<Self> {
        let (repository, selector) = match spec.split_once(':') {
            Some((repository, selector)) => (repository, Some(selector)),
            None => (spec, None),
        };
        let (owner, name) = repository.split_once('/')?;
        let is_name = |text: &str| {
            let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.chars().all(is_allowed)
        };
        let is_path = |text: &str| text.split('/').all(is_name);
        let is_valid = is_name(owner) && is_name(name) && selector.is_none_or(is_path);
        is_valid.then(|| HubId {
            owner: owner.to_owned(),
            name: name.to_owned(),
            selector: selector.map(str::to_owned),
        })
    }

    pub(super) fn repository(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }
}

/// What of a repository makes a model.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Choice {
    /// A GGUF file, all its parts if it is split.
    Files(Vec<String>),
    /// config.json with its companions and safetensors files.
    Folder,
}

impl Hub {
    /// The local path of a model: a GGUF file or a folder in the client's cache.
    pub(super) fn resolve(
        &self,
        id: &HubId,
        progress: ProgressSink<'_>,
    ) -> Result<PathBuf, SourceError> {
        progress(FetchProgress::Trying {
            source: format!("Hub {}", id.repository()),
        });
        let choice = match id.selector.as_deref().filter(|selector| is_gguf(selector)) {
            Some(file) => Choice::Files(parts_of(file)),
            None => choose(&self.list(id, progress)?, id.selector.as_deref())?,
        };
        match choice {
            Choice::Files(files) => self.files(id, &files, progress),
            Choice::Folder => self.folder(id, progress),
        }
    }

    /// Downloads one file into `folder`, past the client's cache. The file is (repository, revision, path).
    pub(super) fn download_to(
        &self,
        folder: &Path,
        (repository, revision, file): (&str, &str, &str),
        progress: ProgressSink<'_>,
    ) -> Result<PathBuf, SourceError> {
        let (owner, name) = repository.split_once('/').unwrap_or((repository, ""));
        let repository = self.repository(owner, name)?;
        let (folder, revision, file) = (folder.to_owned(), revision.to_owned(), file.to_owned());
        guarded(progress, move |handler| {
            repository
                .download_file()
                .filename(file)
                .revision(revision)
                .local_dir(folder)
                .progress(handler)
                .send()
        })
    }

    fn repository(
        &self,
        owner: &str,
        name: &str,
    ) -> Result<HFRepositorySync<RepoTypeModel>, SourceError> {
        let mut builder = HFClient::builder()
            .user_agent(concat!("millpond/", env!("CARGO_PKG_VERSION")))
            .retry_max_attempts(MAX_RETRIES);
        if let Some((endpoint, cache)) = &self.place {
            builder = builder.endpoint(endpoint).cache_dir(cache);
        }
        let client = builder.build_sync().map_err(|error| failed(&error))?;
        Ok(client.model(owner, name))
    }

    fn of(&self, id: &HubId) -> Result<HFRepositorySync<RepoTypeModel>, SourceError> {
        self.repository(&id.owner, &id.name)
    }

    /// Paths of the repository's files; without a network, those of the newest snapshot in the cache.
    fn list(&self, id: &HubId, progress: ProgressSink<'_>) -> Result<Vec<String>, SourceError> {
        let repository = self.of(id)?;
        let listed = guarded(progress, move |_| {
            repository.list_tree().recursive(true).send()
        });
        match listed {
            Ok(entries) => Ok(entries.into_iter().filter_map(file_path).collect()),
            Err(error) => match self.cached_folder(id) {
                Ok(folder) => Ok(names_in(&folder)?),
                Err(_) => Err(error),
            },
        }
    }

    fn cached_folder(&self, id: &HubId) -> Result<PathBuf, SourceError> {
        let cached = self
            .of(id)?
            .snapshot_download()
            .local_files_only(true)
            .send();
        cached.map_err(|error| failed(&error))
    }

    /// Files of one snapshot; the path of the first.
    fn files(
        &self,
        id: &HubId,
        files: &[String],
        progress: ProgressSink<'_>,
    ) -> Result<PathBuf, SourceError> {
        let mut first = None;
        for file in files {
            let path = self.file(id, file, progress)?;
            first.get_or_insert(path);
        }
        first.ok_or_else(|| SourceError::Choice("no file was chosen".to_owned()))
    }

    /// One file, from the cache if it is there.
    fn file(
        &self,
        id: &HubId,
        file: &str,
        progress: ProgressSink<'_>,
    ) -> Result<PathBuf, SourceError> {
        let repository = self.of(id)?;
        let cached = repository
            .download_file()
            .filename(file)
            .local_files_only(true)
            .send();
        if let Ok(path) = cached {
            return Ok(path);
        }
        let file = file.to_owned();
        guarded(progress, move |handler| {
            repository
                .download_file()
                .filename(file)
                .progress(handler)
                .send()
        })
    }

    fn folder(&self, id: &HubId, progress: ProgressSink<'_>) -> Result<PathBuf, SourceError> {
        let repository = self.of(id)?;
        let patterns = FOLDER_FILES.map(str::to_owned).to_vec();
        let fetched = guarded(progress, move |handler| {
            repository
                .snapshot_download()
                .allow_patterns(patterns)
                .progress(handler)
                .send()
        });
        fetched.or_else(|error| self.cached_folder(id).map_err(|_| error))
    }
}

fn is_gguf(path: &str) -> bool {
    path.to_ascii_lowercase().ends_with(".gguf")
}

fn file_path(entry: RepoTreeEntry) -> Option<String> {
    match entry {
        RepoTreeEntry::File { path, .. } => Some(path),
        RepoTreeEntry::Directory { .. } => None,
    }
}

fn names_in(folder: &Path) -> Result<Vec<String>, SourceError> {
    let entries = std::fs::read_dir(folder)?;
    let names = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok());
    Ok(names.collect())
}

/// What to take of a repository with these files.
fn choose(files: &[String], quantisation: Option<&str>) -> Result<Choice, SourceError> {
    let has = |wanted: &str| files.iter().any(|file| file == wanted);
    let has_weights = has("model.safetensors") || has("model.safetensors.index.json");
    if quantisation.is_none() && has("config.json") && has_weights {
        return Ok(Choice::Folder);
    }
    let models: Vec<&String> = files
        .iter()
        .filter(|file| is_gguf(file) && !file.contains("mmproj") && is_first_part(file))
        .collect();
    let fitting: Vec<&String> = match quantisation {
        Some(wanted) => models
            .iter()
            .copied()
            .filter(|file| is_quantised_as(file, wanted))
            .collect(),
        None => models.clone(),
    };
    match fitting.as_slice() {
        [single] => Ok(Choice::Files(parts_of(single))),
        [] if models.is_empty() => Err(SourceError::Choice(
            "the repository holds neither a GGUF file nor config.json with model.safetensors"
                .to_owned(),
        )),
        _ => Err(SourceError::Choice(format!(
            "name one file after a colon: {}",
            models
                .iter()
                .map(|file| file.as_str())
                .collect::<Vec<_>>()
                .join(", ")
        ))),
    }
}

/// `NAME-00001-of-00003.gguf` as (NAME, 1, 3).
fn split_name(file: &str) -> Option<(&str, u32, u32)> {
    let (head, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, part) = head.rsplit_once('-')?;
    let number = |text: &str| (text.len() == 5).then(|| text.parse().ok()).flatten();
    Some((stem, number(part)?, number(count)?))
}

fn is_first_part(file: &str) -> bool {
    split_name(file).is_none_or(|(_, part, _)| part == 1)
}

/// All parts of a split file, first to last; a plain file alone.
fn parts_of(file: &str) -> Vec<String> {
    match split_name(file) {
        Some((stem, _, count)) => (1..=count)
            .map(|part| format!("{stem}-{part:05}-of-{count:05}.gguf"))
            .collect(),
        None => vec![file.to_owned()],
    }
}

/// The name ends in the quantisation: `…-Q4_K.gguf` is not `Q4_K_M`, and `…IQ4_XS.gguf` is not `Q4_XS`.
fn is_quantised_as(file: &str, quantisation: &str) -> bool {
    let stem = match split_name(file) {
        Some((stem, _, _)) => stem,
        None => file
            .get(..file.len().saturating_sub(".gguf".len()))
            .unwrap_or(file),
    };
    let head = stem.to_ascii_lowercase();
    head.strip_suffix(&quantisation.to_ascii_lowercase())
        .is_some_and(|head| head.is_empty() || head.ends_with(['-', '.', '_', '/']))
}

/// What the client's thread tells us.
enum Event<T> {
    Progress { done: u64, total: u64 },
    Finished(HFResult<T>),
}

/// Sends the client's progress to the thread that waits.
struct Reporter<T> {
    sender: Sender<Event<T>>,
    state: std::sync::Mutex<Totals>,
}

#[derive(Default)]
struct Totals {
    total: u64,
    by_file: BTreeMap<String, u64>,
}

impl<T: Send> ProgressHandler for Reporter<T> {
    fn on_progress(&self, event: &ProgressEvent) {
        let ProgressEvent::Download(event) = event else {
            return;
        };
        let Ok(mut totals) = self.state.lock() else {
            return;
        };
        let done = totals.after(event);
        let total = totals.total.max(done);
        // The one who waited may have given up.
        let _ = self.sender.send(Event::Progress { done, total });
    }
}

impl Totals {
    /// Bytes done after an event.
    fn after(&mut self, event: &DownloadEvent) -> u64 {
        match event {
            DownloadEvent::Start { total_bytes, .. } => self.total = *total_bytes,
            DownloadEvent::Progress { files } => {
                for file in files {
                    self.by_file
                        .insert(file.filename.clone(), file.bytes_completed);
                }
            }
            DownloadEvent::AggregateProgress {
                bytes_completed, ..
            } => return *bytes_completed,
            DownloadEvent::Complete => {}
        }
        self.by_file.values().sum()
    }
}

/// Runs a call of the client on a thread of its own and gives up when nothing is heard from it: the client has no
/// timeouts. A thread that was given up ends by itself, at the latest when the system closes its connection.
fn guarded<T: Send + 'static>(
    progress: ProgressSink<'_>,
    call: impl FnOnce(Progress) -> HFResult<T> + Send + 'static,
) -> Result<T, SourceError> {
    let (sender, receiver) = mpsc::channel();
    std::thread::Builder::new()
        .name("hub-download".to_owned())
        .spawn(move || {
            let handler = Reporter {
                sender: sender.clone(),
                state: std::sync::Mutex::default(),
            };
            let result = call(Progress::new(handler));
            let _ = sender.send(Event::Finished(result));
        })?;
    let mut patience = FIRST_ANSWER;
    loop {
        match receiver.recv_timeout(patience) {
            Ok(Event::Progress { done, total }) => {
                patience = STALL;
                progress(FetchProgress::Downloading { done, total });
            }
            Ok(Event::Finished(result)) => return result.map_err(|error| failed(&error)),
            Err(RecvTimeoutError::Timeout) => {
                return Err(SourceError::Silent {
                    seconds: patience.as_secs(),
                });
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(SourceError::Hub("the client's thread ended".to_owned()));
            }
        }
    }
}

/// The client's error with its causes, on one line.
fn failed(error: &dyn std::error::Error) -> SourceError {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        cause = error.source();
    }
    let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
    SourceError::Hub(line.chars().take(MAX_MESSAGE_CHARS).collect())
}

#[cfg(test)]
mod tests;
