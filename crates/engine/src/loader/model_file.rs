//! One regular file of a model: opened once, read by position.
//!
//! Nothing is mapped: a mapping needs `unsafe`, and a file that shrinks under it ends the process.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::LoadError;

/// An open file whose length was taken when it was opened.
#[derive(Debug)]
pub(super) struct ModelFile {
    path: PathBuf,
    file: File,
    len: u64,
}

impl ModelFile {
    /// Opens a regular file. Pipes and devices are refused before they are opened, because that could block.
    pub(super) fn open(path: &Path) -> Result<Self, LoadError> {
        let metadata = std::fs::metadata(path).map_err(|source| LoadError::io(path, source))?;
        if !metadata.is_file() {
            return Err(LoadError::no_model(path, "not a regular file"));
        }
        let file = File::open(path).map_err(|source| LoadError::io(path, source))?;
        Ok(ModelFile {
            path: path.to_owned(),
            len: metadata.len(),
            file,
        })
    }

    /// Reads a small file whole; one longer than `max_bytes` is refused unread.
    pub(super) fn read_small(path: &Path, max_bytes: u64) -> Result<Vec<u8>, LoadError> {
        let file = Self::open(path)?;
        if file.len > max_bytes {
            let problem = format!("{} bytes, at most {max_bytes} are read", file.len);
            return Err(LoadError::malformed(path, "file size", problem));
        }
        let mut bytes = vec![0; file.len as usize];
        file.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// A buffered reader from the first byte on.
    pub(super) fn reader(&self) -> impl BufRead + '_ {
        let file = &self.file;
        BufReader::with_capacity(64 * 1024, FromStart { file, offset: 0 })
    }

    /// Fills `buffer` from `offset` on.
    pub(super) fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), LoadError> {
        self.file
            .read_exact_at(buffer, offset)
            .map_err(|source| LoadError::io(&self.path, source))
    }

    /// Feeds the first `num_bytes` bytes to `hash`.
    pub(super) fn hash_head(&self, num_bytes: u64, hash: &mut Sha256) -> Result<(), LoadError> {
        let mut head = self.reader().take(num_bytes);
        loop {
            let chunk = head
                .fill_buf()
                .map_err(|source| LoadError::io(&self.path, source))?;
            if chunk.is_empty() {
                return Ok(());
            }
            hash.update(chunk);
            let num_read = chunk.len();
            head.consume(num_read);
        }
    }
}

/// Reads a file by position, so that readers of one open file do not move each other's cursor.
struct FromStart<'a> {
    file: &'a File,
    offset: u64,
}

impl Read for FromStart<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let num_read = self.file.read_at(buffer, self.offset)?;
        self.offset += num_read as u64;
        Ok(num_read)
    }
}
