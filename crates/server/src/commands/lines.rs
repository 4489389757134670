//! Aligned lines of names and values.

use std::fmt::Display;

/// Lines for people, made one by one.
#[derive(Default)]
pub struct Lines(String);

impl Lines {
    /// Appends a line.
    pub fn add(&mut self, name: &str, value: impl Display) {
        let value = value.to_string();
        let safe: String = value.chars().map(replace_control).collect();
        self.0.push_str(&format!("{name:<16} {safe}\n"));
    }

    /// Appends a line if there is a value.
    pub fn add_if(&mut self, name: &str, value: Option<impl Display>) {
        if let Some(value) = value {
            self.add(name, value);
        }
    }

    /// All lines.
    pub fn into_text(self) -> String {
        self.0
    }
}

/// Names in files come from strangers.
fn replace_control(char: char) -> char {
    if char.is_control() { '\u{FFFD}' } else { char }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_aligned_and_harmless() {
        let mut lines = Lines::default();
        lines.add("name", "a\u{1b}[2J");
        lines.add_if("context", Some(8192));
        lines.add_if("licence", None::<&str>);
        assert_eq!(
            lines.into_text(),
            "name             a\u{fffd}[2J\ncontext          8192\n"
        );
    }
}
