//! The event log of a run: one line per event, and a digest of all of them.
//!
//! Lines begin with the time in nanoseconds; they hold nothing that differs from machine to machine.

use std::fmt::{self, Write};

use crate::time::Timestamp;

/// FNV-1a, 64 bits (Fowler, Noll and Vo).
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;

/// Digests every line and hands it to whoever listens.
pub struct Journal<'a> {
    digest: u64,
    line: String,
    listener: Option<&'a mut dyn FnMut(&str)>,
}

impl<'a> Journal<'a> {
    /// An empty log.
    pub fn new(listener: Option<&'a mut dyn FnMut(&str)>) -> Self {
        Journal {
            digest: FNV_OFFSET,
            line: String::new(),
            listener,
        }
    }

    /// Appends a line.
    pub fn note(&mut self, now: Timestamp, what: fmt::Arguments<'_>) {
        self.line.clear();
        // Writing to a string cannot fail.
        let _ = write!(self.line, "{} {what}", now.0);
        let bytes = self.line.bytes().chain([b'\n']);
        self.digest = bytes.fold(self.digest, |digest, byte| {
            (digest ^ u64::from(byte)).wrapping_mul(FNV_PRIME)
        });
        if let Some(listener) = &mut self.listener {
            listener(&self.line);
        }
    }

    /// Digest of all lines so far.
    pub fn digest(&self) -> u64 {
        self.digest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_is_that_of_the_lines() {
        let mut lines = Vec::new();
        let mut listener = |line: &str| lines.push(line.to_owned());
        let mut journal = Journal::new(Some(&mut listener));
        journal.note(Timestamp(5), format_args!("arrive request={}", 1));
        let one = journal.digest();
        journal.note(Timestamp(6), format_args!("end"));
        assert_ne!(journal.digest(), one);
        let mut again = Journal::new(None);
        again.note(Timestamp(5), format_args!("arrive request=1"));
        assert_eq!(again.digest(), one);
        drop(journal);
        assert_eq!(lines, ["5 arrive request=1", "6 end"]);
    }
}
