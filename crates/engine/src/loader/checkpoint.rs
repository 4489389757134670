//! A model's files as found: attributes, and tensors under the names they have there.
//!
//! It knows which files make a model and reads their headers; it does not know what any name means.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::error::printable;
use super::families::{Family, Naming};
use super::header::StoredTensor;
use super::hf::{self, HubFolder};
use super::metadata::Metadata;
use super::model_file::ModelFile;
use super::{LoadError, gguf, safetensors};
use crate::digest::hex;

/// Open files with their headers parsed.
#[derive(Debug)]
pub(super) struct Checkpoint {
    /// As given.
    pub path: PathBuf,
    pub attributes: Attributes,
    pub files: Vec<ModelFile>,
    /// By stored name.
    pub tensors: BTreeMap<String, StoredTensor>,
    /// Hash of everything but the tensor data.
    pub fingerprint: String,
}

/// What the files say beside tensors.
#[derive(Debug)]
pub(super) enum Attributes {
    Gguf(Metadata),
    Hub(HubFolder),
    /// A safetensors file alone.
    None,
}

/// Most parts of a split GGUF file.
const MAX_PARTS: u64 = 1 << 10;
/// Hex digits of a fingerprint: 64 bits tell a user's files apart and fit a log line.
const FINGERPRINT_DIGITS: usize = 16;

impl Checkpoint {
    /// Opens a GGUF file, a safetensors file, a Hub folder, or a folder with one GGUF file.
    pub(super) fn open(path: &Path) -> Result<Self, LoadError> {
        let metadata = std::fs::metadata(path).map_err(|source| LoadError::io(path, source))?;
        if !metadata.is_dir() {
            return match extension(path) {
                Some("safetensors") => open_safetensors(path),
                Some(_) | None => open_gguf(path),
            };
        }
        if hf::has_safetensors(path) {
            return open_hub_folder(path);
        }
        open_gguf(&single_gguf(path)?)
    }

    /// The family as the files name it.
    pub(super) fn architecture(&self) -> Option<&str> {
        match &self.attributes {
            Attributes::Gguf(metadata) => metadata.text("general.architecture"),
            Attributes::Hub(folder) => folder.model_type(),
            Attributes::None => None,
        }
    }

    pub(super) fn naming(&self) -> Naming {
        match &self.attributes {
            Attributes::Gguf(_) => Naming::Gguf,
            Attributes::Hub(_) | Attributes::None => Naming::Hub,
        }
    }

    /// A value of config.json; none in other formats.
    pub(super) fn hub_value(&self, key: &str) -> Option<&Value> {
        match &self.attributes {
            Attributes::Hub(folder) => folder.config.get(key),
            Attributes::Gguf(_) | Attributes::None => None,
        }
    }

    /// The tensor that the family stores for one of our names (of layer 0).
    pub(super) fn named(&self, family: &Family, our_name: &str) -> Option<&StoredTensor> {
        let name = family.stored_name(self.naming(), our_name)?;
        self.tensors.get(&name)
    }

    /// Reads a tensor's data.
    pub(super) fn read(&self, tensor: &StoredTensor) -> Result<Vec<u8>, LoadError> {
        read_tensor(&self.files, tensor)
    }

    /// The error of a checkpoint that has tensors and no configuration.
    pub(super) fn no_config(&self) -> LoadError {
        let problem = "a safetensors file without config.json; give the folder that holds both";
        LoadError::no_model(&self.path, problem)
    }
}

/// Reads a tensor's data from the file that holds it.
pub(super) fn read_tensor(
    files: &[ModelFile],
    tensor: &StoredTensor,
) -> Result<Vec<u8>, LoadError> {
    let no_memory = || LoadError::OutOfMemory {
        name: tensor.name.clone(),
        num_bytes: tensor.num_bytes,
    };
    let file = files.get(tensor.part).ok_or_else(no_memory)?;
    let len = usize::try_from(tensor.num_bytes).map_err(|_| no_memory())?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| no_memory())?;
    bytes.resize(len, 0);
    file.read_exact_at(&mut bytes, tensor.offset)?;
    Ok(bytes)
}

/// Files and tensors collected so far.
#[derive(Default)]
struct Collection {
    files: Vec<ModelFile>,
    tensors: BTreeMap<String, StoredTensor>,
    hash: Sha256,
}

impl Collection {
    fn add_gguf(&mut self, path: &Path) -> Result<Metadata, LoadError> {
        let file = ModelFile::open(path)?;
        let header = gguf::read_header(&mut file.reader(), file.len())
            .map_err(|error| error.in_file(path))?;
        self.add(file, header.tensors, header.data_start)?;
        Ok(header.metadata)
    }

    fn add_safetensors(&mut self, path: &Path) -> Result<(), LoadError> {
        let file = ModelFile::open(path)?;
        let header = safetensors::read_header(&mut file.reader(), file.len())
            .map_err(|error| error.in_file(path))?;
        self.add(file, header.tensors, header.data_start)
    }

    fn add(
        &mut self,
        file: ModelFile,
        tensors: Vec<StoredTensor>,
        data_start: u64,
    ) -> Result<(), LoadError> {
        file.hash_head(data_start.min(file.len()), &mut self.hash)?;
        for mut tensor in tensors {
            tensor.part = self.files.len();
            let path = file.path();
            if let Some(twin) = self.tensors.insert(tensor.name.clone(), tensor) {
                let problem = "another file of the model holds this tensor too";
                return Err(LoadError::malformed(path, twin.name, problem));
            }
        }
        self.files.push(file);
        Ok(())
    }

    fn into_checkpoint(self, path: &Path, attributes: Attributes) -> Checkpoint {
        let digest = hex(&self.hash.finalize());
        Checkpoint {
            path: path.to_owned(),
            attributes,
            files: self.files,
            tensors: self.tensors,
            fingerprint: digest.chars().take(FINGERPRINT_DIGITS).collect(),
        }
    }
}

fn extension(path: &Path) -> Option<&str> {
    path.extension().and_then(|extension| extension.to_str())
}

fn open_safetensors(path: &Path) -> Result<Checkpoint, LoadError> {
    let mut collection = Collection::default();
    collection.add_safetensors(path)?;
    Ok(collection.into_checkpoint(path, Attributes::None))
}

fn open_gguf(path: &Path) -> Result<Checkpoint, LoadError> {
    let mut collection = Collection::default();
    let metadata = collection.add_gguf(path)?;
    for sibling in split_siblings(path, &metadata)? {
        collection.add_gguf(&sibling)?;
    }
    if let Some(promised) = metadata.unsigned("split.tensors.count")
        && promised != collection.tensors.len() as u64
    {
        let problem = format!("{promised} promised, {} found", collection.tensors.len());
        return Err(LoadError::malformed(path, "split.tensors.count", problem));
    }
    Ok(collection.into_checkpoint(path, Attributes::Gguf(metadata)))
}

/// The parts after the first of a split file, named `NAME-00001-of-00003.gguf`.
fn split_siblings(first: &Path, metadata: &Metadata) -> Result<Vec<PathBuf>, LoadError> {
    let count = metadata.unsigned("split.count").unwrap_or(1);
    if count <= 1 {
        return Ok(Vec::new());
    }
    let malformed = |problem: String| Err(LoadError::malformed(first, "split.count", problem));
    if count > MAX_PARTS {
        return malformed(format!("{count}, at most {MAX_PARTS}"));
    }
    if metadata.unsigned("split.no").is_some_and(|part| part != 0) {
        return malformed("this is not the first part; give the one named …-00001-of-…".to_owned());
    }
    let name = first
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    let suffix = |part: u64| format!("-{part:05}-of-{count:05}.gguf");
    let Some(stem) = name.strip_suffix(&suffix(1)) else {
        return malformed(format!(
            "{count} parts, so the name must end in {}",
            suffix(1)
        ));
    };
    let sibling = |part| first.with_file_name(format!("{stem}{}", suffix(part)));
    Ok((2..=count).map(sibling).collect())
}

fn open_hub_folder(path: &Path) -> Result<Checkpoint, LoadError> {
    if !path.join(hf::CONFIG).exists() {
        return Err(LoadError::no_model(path, "the folder has no config.json"));
    }
    let folder = HubFolder::read(path)?;
    let weights = hf::weight_files(path)?;
    let mut collection = Collection::default();
    for file in &weights.paths {
        collection.add_safetensors(file)?;
    }
    let missing = |name: &&String| !collection.tensors.contains_key(*name);
    if let Some(name) = weights.promised.iter().find(missing) {
        return Err(LoadError::MissingTensor {
            name: printable(name.clone()),
        });
    }
    hash_folder(&folder, &mut collection.hash);
    Ok(collection.into_checkpoint(path, Attributes::Hub(folder)))
}

/// What the small files of a folder say bears on the answers as much as a tensor table.
fn hash_folder(folder: &HubFolder, hash: &mut Sha256) {
    for settings in [&folder.config, &folder.generation] {
        for (key, value) in settings {
            hash.update(key);
            hash.update(value.to_string());
        }
    }
    for bytes in [&folder.tokenizer, &folder.tokenizer_settings] {
        hash.update(bytes.as_deref().unwrap_or_default());
    }
    hash.update(folder.chat_template.as_deref().unwrap_or_default());
}

/// The GGUF file of a folder; of a split one, the first part.
fn single_gguf(folder: &Path) -> Result<PathBuf, LoadError> {
    let entries = std::fs::read_dir(folder).map_err(|source| LoadError::io(folder, source))?;
    let mut found = Vec::new();
    for entry in entries {
        let path = entry
            .map_err(|source| LoadError::io(folder, source))?
            .path();
        if extension(&path) == Some("gguf") && !is_later_part(&path) {
            found.push(path);
        }
    }
    match found.as_slice() {
        [single] => Ok(single.clone()),
        [] => Err(LoadError::no_model(
            folder,
            "the folder holds neither model.safetensors nor a GGUF file",
        )),
        several => Err(LoadError::no_model(
            folder,
            format!("the folder holds {} GGUF files; name one", several.len()),
        )),
    }
}

/// Named as a part of a split file other than its first.
fn is_later_part(path: &Path) -> bool {
    let stem = path
        .file_stem()
        .and_then(|stem| stem.to_str())
        .unwrap_or_default();
    match stem.rsplit_once("-of-") {
        Some((head, count)) => {
            let is_number =
                |text: &str| text.len() == 5 && text.bytes().all(|c| c.is_ascii_digit());
            let part = head
                .rsplit_once('-')
                .map(|(_, part)| part)
                .unwrap_or_default();
            is_number(count) && is_number(part) && part != "00001"
        }
        None => false,
    }
}
