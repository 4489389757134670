//! Progress on standard error: bars in a terminal, a line per event elsewhere.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use millpond_engine::fetch::FetchProgress;

const TEMPLATE: &str = "{msg:12} [{bar:32}] {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}";

fn new_bar() -> ProgressBar {
    // Hidden by itself where standard error is no terminal.
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template(TEMPLATE).expect("the template is a constant");
    bar.with_style(style.progress_chars("=> "))
}

/// Shows a download.
pub struct FetchBar {
    bar: Option<ProgressBar>,
    is_terminal: bool,
}

impl FetchBar {
    /// Shows nothing until something happens: a model that is here already makes no noise.
    pub fn new() -> Self {
        FetchBar {
            bar: None,
            is_terminal: std::io::stderr().is_terminal(),
        }
    }

    /// Shows what fetching does.
    pub fn show(&mut self, progress: FetchProgress) {
        match progress {
            FetchProgress::Waiting => self.say("waiting for another download of the same model"),
            FetchProgress::Trying { source } => self.say(&format!("fetching from {source}")),
            FetchProgress::Failed { source, problem } => {
                // If every source fails, the error names each problem.
                tracing::info!(%source, %problem, "source failed");
                self.say(&format!("{source} did not deliver, trying the next source"));
            }
            FetchProgress::Downloading { done, total } => self.advance("downloading", done, total),
            FetchProgress::Unpacking { done, total } => self.advance("unpacking", done, total),
        }
    }

    fn say(&mut self, line: &str) {
        match &self.bar {
            Some(bar) if self.is_terminal => bar.println(line),
            Some(_) | None => eprintln!("{line}"),
        }
    }

    fn advance(&mut self, message: &'static str, done: u64, total: u64) {
        let bar = self.bar.get_or_insert_with(new_bar);
        bar.set_message(message);
        bar.set_length(total);
        bar.set_position(done);
    }
}

impl Drop for FetchBar {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Shows the reading of weights.
pub struct LoadBar {
    bar: ProgressBar,
}

impl LoadBar {
    /// An empty bar.
    pub fn new() -> Self {
        let bar = new_bar();
        bar.set_message("loading");
        LoadBar { bar }
    }

    /// Shows `done` bytes of `total`.
    pub fn show(&mut self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
    }
}

impl Drop for LoadBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
