//! `millpond bench offline`: prefill and decode of a model through `Llm`, without HTTP and without text to read.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context;
use futures_util::future::join_all;
use millpond_engine::llm::{
    CompletionRequest, Generation, GenerationEvent, GenerationOptions, Limits, Llm, Prompt,
};
use millpond_engine::model::TokenCost;
use millpond_scheduler::{FinishReason, TokenId};
use serde::Serialize;

use super::ceilings::{Ceilings, Setup, threads};
use super::noise::Noise;
use super::samples::{Samples, Spread};
use super::{Output, Report, Setting, percent, token_cost};
use crate::cli::{OfflineArgs, Shape};
use crate::commands::machine::Machine;
use crate::commands::model;

/// What results depend on.
#[derive(Clone, Debug, Serialize)]
pub struct LoadedModel {
    model: String,
    fingerprint: String,
    isa: String,
    num_threads: usize,
    max_batch_tokens: u32,
    num_rounds: usize,
    /// Packed weights that a step reads.
    weight_bytes: u64,
    /// Multiply-adds of a decoded token, attention left out.
    macs_per_token: u64,
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "case", rename_all = "snake_case")]
enum Case {
    /// One prompt up to its first token.
    Prefill { prompt_tokens: usize },
    /// Sequences that all decode, each after a prompt.
    Decode {
        num_sequences: usize,
        depth: usize,
        output_tokens: usize,
    },
}

#[derive(Clone, Debug, Serialize)]
struct CaseResult {
    #[serde(flatten)]
    case: Case,
    tokens_per_s: Spread,
    share_of_bandwidth: Option<f64>,
    share_of_peak: Option<f64>,
}

/// Runs the command.
pub fn run(args: &OfflineArgs) -> anyhow::Result<()> {
    let path = path_of(&args.engine.model)?;
    let cost = path.map(|path| token_cost(&path)).transpose()?;
    let llm = model::load(&args.engine.model, args.engine.options(Limits::default()))?;
    let cases = cases(args);
    cases
        .iter()
        .try_for_each(|case| check(*case, &llm, args.engine.max_sequences))?;

    let output = Output::new(args.measure.json);
    let ceilings = Ceilings::measure(Setup {
        num_threads: llm.info().num_threads,
        working_set_bytes: args
            .measure
            .working_set_bytes(cost.map(|cost| cost.weight_bytes)),
        num_rounds: args.measure.rounds,
    })?;
    let setting = LoadedModel::of(&llm, cost.unwrap_or_default(), args);
    output.line(&ceilings)?;
    output.line(setting.line())?;
    output.line(CaseResult::HEADER)?;

    let bench = Bench {
        llm,
        // Waits and reads while the engine's own threads work.
        runtime: tokio::runtime::Builder::new_current_thread()
            .build()
            .context("cannot start the runtime")?,
        num_rounds: args.measure.rounds,
    };
    let mut results = Vec::new();
    for case in cases {
        let rates = bench.measure(case)?;
        let result = CaseResult::of(case, &rates, cost, &ceilings);
        output.line(result.line())?;
        results.push(result);
    }
    output.document(&Report {
        version: env!("CARGO_PKG_VERSION"),
        machine: Machine::detect(),
        ceilings,
        setting: Setting::Offline(setting),
        results,
    })
}

/// The files of a model; none for the mock model.
fn path_of(spec: &str) -> anyhow::Result<Option<PathBuf>> {
    Ok(match spec {
        model::MOCK => None,
        spec => Some(model::fetch(spec)?),
    })
}

fn cases(args: &OfflineArgs) -> Vec<Case> {
    let prefill = args.prefill.iter().map(|tokens| Case::Prefill {
        prompt_tokens: *tokens,
    });
    let decode = args
        .decode
        .iter()
        .map(|Shape(num_sequences, depth)| Case::Decode {
            num_sequences: *num_sequences,
            depth: *depth,
            output_tokens: args.output_tokens,
        });
    prefill.chain(decode).collect()
}

/// Refuses what could not run all at once: it would be measured as something else.
fn check(case: Case, llm: &Llm, max_sequences: u32) -> anyhow::Result<()> {
    let Case::Decode {
        num_sequences,
        depth,
        output_tokens,
    } = case
    else {
        return Ok(());
    };
    anyhow::ensure!(
        num_sequences <= max_sequences as usize,
        "--decode {num_sequences}x{depth}: only {max_sequences} sequences run at once (--max-sequences)"
    );
    let memory = &llm.info().memory;
    let blocks_each = (depth + output_tokens).div_ceil(memory.block_size as usize);
    anyhow::ensure!(
        num_sequences * blocks_each <= memory.num_blocks as usize,
        "--decode {num_sequences}x{depth}: the keys and values need {} tokens (--kv-tokens)",
        num_sequences * blocks_each * memory.block_size as usize
    );
    Ok(())
}

/// A loaded model and how often to measure.
struct Bench {
    llm: Llm,
    runtime: tokio::runtime::Runtime,
    num_rounds: usize,
}

/// When the tokens of one sequence came.
struct Timeline {
    sent: Instant,
    /// A moment for every token.
    arrivals: Vec<Instant>,
}

impl Bench {
    /// Tokens per second. A first round warms up and is thrown away.
    fn measure(&self, case: Case) -> anyhow::Result<Samples> {
        let mut rates = Vec::new();
        for round in 0..=self.num_rounds as u64 {
            let rate = self.round(case, round)?;
            if round > 0 {
                rates.push(rate);
            }
        }
        Samples::new(rates).context("no round was measured")
    }

    fn round(&self, case: Case, round: u64) -> anyhow::Result<f64> {
        match case {
            Case::Prefill { prompt_tokens } => {
                let timelines = self.generate(1, (prompt_tokens, 1), round)?;
                prefill_rate(&timelines[0], prompt_tokens)
            }
            Case::Decode {
                num_sequences,
                depth,
                output_tokens,
            } => {
                let timelines = self.generate(num_sequences, (depth, output_tokens), round)?;
                decode_rate(&timelines).with_context(|| {
                    format!("{num_sequences} sequences were never decoded together; raise --output-tokens")
                })
            }
        }
    }

    /// Runs `num_sequences` at once, each with a prompt that no other has.
    fn generate(
        &self,
        num_sequences: usize,
        (prompt_tokens, output_tokens): (usize, usize),
        round: u64,
    ) -> anyhow::Result<Vec<Timeline>> {
        let shape = [num_sequences, prompt_tokens].map(|number| number as u64);
        let request = |index: u64| {
            let mut noise = Noise::of(&[shape[0], shape[1], round, index]);
            CompletionRequest {
                prompt: Prompt::Tokens(self.prompt(&mut noise, prompt_tokens)),
                echo: false,
                options: GenerationOptions {
                    max_tokens: Some(output_tokens as u64),
                    temperature: 0.0,
                    ignore_eos: true,
                    ..GenerationOptions::default()
                },
            }
        };
        // Made before the first is sent, so that they arrive together.
        let requests: Vec<_> = (0..num_sequences as u64).map(request).collect();
        let mut running = Vec::new();
        for request in requests {
            let sent = Instant::now();
            running.push(watch(sent, self.llm.complete(request)?));
        }
        self.runtime
            .block_on(join_all(running))
            .into_iter()
            .collect()
    }

    /// Tokens that the vocabulary has, chosen by chance.
    fn prompt(&self, noise: &mut Noise, num_tokens: usize) -> Vec<TokenId> {
        let vocab_size = self.llm.info().vocab_size;
        let mut tokens = Vec::with_capacity(num_tokens);
        while tokens.len() < num_tokens {
            let token = TokenId(noise.below(vocab_size) as u32);
            // Some vocabularies have gaps.
            if !self.llm.token_bytes(token).is_empty() {
                tokens.push(token);
            }
        }
        tokens
    }
}

/// Notes when tokens come; fails unless all did.
async fn watch(sent: Instant, mut generation: Generation) -> anyhow::Result<Timeline> {
    let mut arrivals = Vec::new();
    while let Some(event) = generation.next().await {
        match event {
            GenerationEvent::PromptLogprobs(_) => {}
            GenerationEvent::Delta(delta) => {
                let now = Instant::now();
                arrivals.extend(delta.tokens.iter().map(|_| now));
            }
            GenerationEvent::Finished { reason, .. } => match reason {
                FinishReason::Length => return Ok(Timeline { sent, arrivals }),
                other => anyhow::bail!("a sequence ended early: {other:?}"),
            },
        }
    }
    anyhow::bail!("the engine stopped")
}

/// Prompt tokens over the time to the first token.
fn prefill_rate(timeline: &Timeline, prompt_tokens: usize) -> anyhow::Result<f64> {
    let first = timeline.arrivals.first().context("no token came")?;
    Ok(prompt_tokens as f64 / (*first - timeline.sent).as_secs_f64())
}

/// Tokens per second of all sequences while all of them decode: after the last one's first token, up to the first
/// one's end. None when there is no such time.
fn decode_rate(timelines: &[Timeline]) -> Option<f64> {
    let ends = timelines.iter().map(|timeline| timeline.arrivals.last());
    let starts = timelines.iter().map(|timeline| timeline.arrivals.first());
    let start = starts.collect::<Option<Vec<_>>>()?.into_iter().max()?;
    let end = ends.collect::<Option<Vec<_>>>()?.into_iter().min()?;
    let is_inside = |arrival: &&Instant| start < *arrival && *arrival <= end;
    let arrivals = timelines.iter().flat_map(|timeline| &timeline.arrivals);
    let num_tokens = arrivals.filter(is_inside).count();
    let span = end.checked_duration_since(*start)?.as_secs_f64();
    (num_tokens > 0).then(|| num_tokens as f64 / span)
}

impl LoadedModel {
    fn of(llm: &Llm, cost: TokenCost, args: &OfflineArgs) -> Self {
        let info = llm.info();
        LoadedModel {
            model: info.name.clone(),
            fingerprint: info.fingerprint.clone(),
            isa: info.isa.clone(),
            num_threads: info.num_threads,
            max_batch_tokens: args.engine.max_batch_tokens,
            num_rounds: args.measure.rounds,
            weight_bytes: cost.weight_bytes,
            macs_per_token: cost.macs(),
        }
    }

    fn line(&self) -> String {
        format!(
            "{}: {} kernels, {}, {} read per step, {:.1} M multiply-adds per token",
            self.model,
            self.isa,
            threads(self.num_threads),
            model::mebibytes(self.weight_bytes),
            self.macs_per_token as f64 / 1e6
        )
    }
}

impl CaseResult {
    const HEADER: &str =
        "case                    tokens/s  (range)              % of read  % of peak";

    fn of(case: Case, rates: &Samples, cost: Option<TokenCost>, ceilings: &Ceilings) -> Self {
        let tokens_per_s = rates.spread();
        let rate = tokens_per_s.median;
        let shares = cost.map(|cost| case.shares(rate, cost, ceilings));
        CaseResult {
            case,
            tokens_per_s,
            share_of_bandwidth: shares.and_then(|(bandwidth, _)| bandwidth),
            share_of_peak: shares.map(|(_, peak)| peak),
        }
    }

    fn line(&self) -> String {
        let Spread { median, min, max } = self.tokens_per_s;
        format!(
            "{:<20} {median:>11.1}  {:<18} {:>9}  {:>9}",
            self.case.describe(),
            format!("({min:.1}–{max:.1})"),
            percent(self.share_of_bandwidth),
            percent(self.share_of_peak),
        )
    }
}

impl Case {
    fn describe(self) -> String {
        match self {
            Case::Prefill { prompt_tokens } => format!("prefill {prompt_tokens}"),
            Case::Decode {
                num_sequences,
                depth,
                ..
            } => format!("decode {num_sequences} at {depth}"),
        }
    }

    /// Of the bandwidth, a step of all sequences reading every weight once; of the peak of products. Only the last
    /// token of a prompt pays for the head.
    fn shares(self, rate: f64, cost: TokenCost, ceilings: &Ceilings) -> (Option<f64>, f64) {
        let peak = ceilings.macs(cost.is_quantised);
        match self {
            Case::Prefill { .. } => (None, rate * cost.layer_macs as f64 / peak),
            Case::Decode { num_sequences, .. } => {
                let steps = rate / num_sequences as f64;
                let bandwidth = steps * cost.weight_bytes as f64 / ceilings.read();
                (Some(bandwidth), rate * cost.macs() as f64 / peak)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn timeline(start: Instant, seconds: &[u64]) -> Timeline {
        let at = |second: &u64| start + Duration::from_secs(*second);
        Timeline {
            sent: start,
            arrivals: seconds.iter().map(at).collect(),
        }
    }

    #[test]
    fn prefill_ends_with_the_first_token() {
        let rate = prefill_rate(&timeline(Instant::now(), &[4, 9]), 8);
        assert_eq!(rate.expect("a token came"), 2.0);
        assert!(prefill_rate(&timeline(Instant::now(), &[]), 8).is_err());
    }

    #[test]
    fn decode_counts_while_all_decode() {
        let start = Instant::now();
        let check = |sequences: &[&[u64]], expected: Option<f64>| {
            let timelines: Vec<_> = sequences
                .iter()
                .map(|seconds| timeline(start, seconds))
                .collect();
            assert_eq!(decode_rate(&timelines), expected, "{sequences:?}");
        };
        // One sequence: tokens after the first over the time they took.
        check(&[&[3, 4, 5, 7]], Some(0.75));
        // From 3 to 5: two tokens of each.
        check(&[&[1, 2, 3, 4, 5], &[3, 4, 5, 6, 7]], Some(2.0));
        // The one ends before the other begins.
        check(&[&[1, 2], &[3, 4]], None);
        check(&[&[1]], None);
        check(&[&[1, 2], &[]], None);
    }
}
