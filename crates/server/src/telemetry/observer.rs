//! Watches the events of one generation and feeds the histograms.

use std::time::Instant;

use millpond_engine::llm::GenerationEvent;
use millpond_scheduler::{FinishReason, Summary};

use super::metrics::{FinishedLabel, RequestMetrics};

/// Watches one generation; choices that never finish count as aborted when it is dropped.
pub struct Observer {
    metrics: RequestMetrics,
    choices: Vec<Choice>,
    max_output_tokens: u32,
}

#[derive(Clone, Copy)]
struct Choice {
    last_token: Option<Instant>,
    finished: bool,
}

impl Observer {
    /// Watches a generation of `num_choices`.
    pub fn new(metrics: &super::metrics::Metrics, num_choices: u32) -> Self {
        let metrics = metrics.requests.clone();
        metrics.counts.params_n.observe(f64::from(num_choices));
        let choice = Choice {
            last_token: None,
            finished: false,
        };
        Observer {
            metrics,
            choices: vec![choice; num_choices as usize],
            max_output_tokens: 0,
        }
    }

    /// Takes note of an event.
    pub fn observe(&mut self, event: &GenerationEvent) {
        match event {
            GenerationEvent::PromptLogprobs(_) => {}
            GenerationEvent::Delta(delta) => self.observe_tokens(delta.choice),
            GenerationEvent::Finished {
                last,
                reason,
                summary,
                ..
            } => self.observe_end(last.choice, reason, summary),
        }
    }

    fn observe_tokens(&mut self, choice: u32) {
        let Some(choice) = self.choices.get_mut(choice as usize) else {
            return;
        };
        let now = Instant::now();
        if let Some(last) = choice.last_token.replace(now) {
            let gap = now.duration_since(last).as_secs_f64();
            self.metrics.times.inter_token.observe(gap);
        }
    }

    fn observe_end(&mut self, choice: u32, reason: &FinishReason, summary: &Summary) {
        let Some(choice) = self.choices.get_mut(choice as usize) else {
            return;
        };
        choice.finished = true;
        self.metrics.observe_end(reason, summary);
        self.max_output_tokens = self.max_output_tokens.max(summary.num_output_tokens);
        if self.choices.iter().all(|choice| choice.finished) {
            let max = f64::from(self.max_output_tokens);
            self.metrics.counts.longest_choice.observe(max);
        }
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        for _ in self.choices.iter().filter(|choice| !choice.finished) {
            self.metrics.count_end(FinishedLabel::Abort);
        }
    }
}
