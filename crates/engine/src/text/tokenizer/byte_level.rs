//! The alphabet of byte-level vocabularies: every byte spelled as one printable character.
//!
//! Radford et al., "Language models are unsupervised multitask learners" (GPT-2), 2019.

/// The character that stands for `byte`: itself if Latin-1 prints it, else one from U+0100 on, in the bytes' order.
pub(crate) fn spell(byte: u8) -> char {
    if is_printable(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&other| !is_printable(other)).count();
    u32::try_from(rank)
        .ok()
        .and_then(|rank| char::from_u32(0x100 + rank))
        .expect("fewer than 256 bytes are not printable")
}

/// The byte that `character` stands for.
fn byte_of(character: char) -> Option<u8> {
    match u8::try_from(character) {
        Ok(byte) => is_printable(byte).then_some(byte),
        Err(_) => {
            let rank = u32::from(character).checked_sub(0x100)?;
            (0..=u8::MAX)
                .filter(|&byte| !is_printable(byte))
                .nth(rank as usize)
        }
    }
}

/// The bytes that a token stands for. A spelling outside the alphabet, as some added tokens have, stands for itself.
pub(crate) fn bytes_of(spelling: &str) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = spelling.chars().map(byte_of).collect();
    bytes.unwrap_or_else(|| spelling.as_bytes().to_vec())
}

fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spells_every_byte_as_its_own_character() {
        for byte in 0..=u8::MAX {
            assert_eq!(byte_of(spell(byte)), Some(byte));
        }
        assert_eq!([b' ', b'\n', b'a', 0xE9].map(spell), ['Ġ', 'Ċ', 'a', 'é']);
        assert_eq!(bytes_of("Ġcaf\u{c3}\u{a9}"), " café".as_bytes());
        assert_eq!(bytes_of("<｜end｜>"), "<｜end｜>".as_bytes());
    }
}
