//! `millpond bench serve`: a running server under streams at once.

use std::io::IsTerminal;
use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use futures_util::StreamExt;
use millpond_engine::model::TokenCost;
use serde::Serialize;

use super::ceilings::{Ceilings, Setup};
use super::noise::Noise;
use super::samples::{Latency, Samples, Spread};
use super::stream::{Ask, Endpoint, RawStream, StreamError, Timing};
use super::words::{WordCount, words};
use super::{Output, Report, Setting, percent, token_cost};
use crate::cli::ServerLoadArgs;
use crate::commands::machine::{Machine, num_processors};
use crate::commands::model;

/// Requests of a round with few streams: enough for a percentile to mean something.
const MIN_REQUESTS: usize = 4;

/// Words of the two prompts that tell how the server counts.
const PROBE_WORDS: (usize, usize) = (64, 192);

/// The server and the settings that results depend on.
#[derive(Clone, Debug, Serialize)]
pub struct Target {
    base_url: String,
    model: String,
    seed: u64,
    num_rounds: usize,
    shared_prefix_tokens: usize,
    output_tokens: usize,
}

/// One number of streams.
#[derive(Clone, Debug, Serialize)]
struct LevelResult {
    num_streams: usize,
    num_requests: usize,
    num_failed: usize,
    /// Median over requests, as the server counts.
    prompt_tokens: f64,
    /// Median over requests, as the server says.
    cached_tokens: f64,
    /// From the first request sent to the last token received, by round.
    output_tokens_per_s: Spread,
    /// The same with the tokens of prompts.
    total_tokens_per_s: Spread,
    ttft_s: Latency,
    /// None when no answer came in two pieces.
    itl_s: Option<Latency>,
    share_of_bandwidth: Option<f64>,
    share_of_peak: Option<f64>,
}

/// Runs the command.
pub fn run(args: &ServerLoadArgs) -> anyhow::Result<()> {
    check(args)?;
    let endpoint = Endpoint::new(&args.base_url, args.api_key.as_deref(), args.timeout)?;
    let cost = args.weights.as_deref().map(cost_of).transpose()?;
    // One thread is enough for a client that only waits and reads, and leaves the others to the server.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    // Before anything is measured: a server that is not there need not cost that wait.
    let (model, counts) = runtime.block_on(probe(&endpoint, args))?;
    let output = Output::new(args.measure.json);
    let ceilings = Ceilings::measure(Setup {
        num_threads: args.threads.unwrap_or_else(num_processors),
        working_set_bytes: args
            .measure
            .working_set_bytes(cost.map(|cost| cost.weight_bytes)),
        num_rounds: args.measure.rounds,
    })?;
    let load = Load {
        endpoint,
        args,
        target: Target {
            base_url: args.base_url.clone(),
            model,
            seed: args.seed.unwrap_or_else(new_seed),
            num_rounds: args.measure.rounds,
            shared_prefix_tokens: args.shared_prefix,
            output_tokens: args.output_tokens,
        },
        counts,
        limits: cost.map(|cost| (cost, ceilings.clone())),
    };
    load.describe(output, &ceilings)?;
    let mut results = Vec::new();
    let mut first_failure = None;
    for num_streams in &args.streams {
        let (level, failure) = runtime.block_on(load.measure(*num_streams))?;
        output.line(level.line())?;
        results.push(level);
        first_failure = first_failure.or(failure);
    }
    let num_failed: usize = results.iter().map(|level| level.num_failed).sum();
    output.document(&Report {
        version: env!("CARGO_PKG_VERSION"),
        machine: Machine::detect(),
        ceilings,
        setting: Setting::Serve(load.target),
        results,
    })?;
    match first_failure {
        Some(failure) => {
            Err(anyhow::Error::new(failure)
                .context(format!("{num_failed} requests failed; the first")))
        }
        None => Ok(()),
    }
}

fn check(args: &ServerLoadArgs) -> anyhow::Result<()> {
    anyhow::ensure!(
        args.shared_prefix <= args.prompt_tokens,
        "--shared-prefix {} exceeds --prompt-tokens {}",
        args.shared_prefix,
        args.prompt_tokens
    );
    Ok(())
}

/// What a token of the served model costs.
fn cost_of(spec: &str) -> anyhow::Result<TokenCost> {
    let path = model::fetch(spec)?;
    token_cost(Path::new(&path))
}

/// A seed that no earlier run had.
fn new_seed() -> u64 {
    uuid::Uuid::new_v4().as_u64_pair().1
}

/// The name of the model, and how the server counts words. Fails when there is no server.
async fn probe(
    endpoint: &Endpoint,
    args: &ServerLoadArgs,
) -> Result<(String, WordCount), StreamError> {
    let model = match &args.model {
        Some(model) => model.clone(),
        None => endpoint.first_model().await?,
    };
    let count = async |num_words: usize| {
        let ask = Ask {
            model: model.clone(),
            prompt: words(&mut Noise::of(&[num_words as u64]), num_words),
            num_output: 1,
        };
        let timing = endpoint.timing(&endpoint.stream(&ask).await?)?;
        Ok::<_, StreamError>((num_words, timing.num_prompt))
    };
    let counts = WordCount::of(count(PROBE_WORDS.0).await?, count(PROBE_WORDS.1).await?);
    Ok((model, counts))
}

/// What is sent to which server.
struct Load<'a> {
    endpoint: Endpoint,
    args: &'a ServerLoadArgs,
    target: Target,
    counts: WordCount,
    /// What a token costs, and what it is compared with; none when the model is not named.
    limits: Option<(TokenCost, Ceilings)>,
}

/// What one round of one level came to.
struct Round {
    timings: Vec<Timing>,
    failures: Vec<StreamError>,
}

impl Load<'_> {
    fn describe(&self, output: Output, ceilings: &Ceilings) -> std::io::Result<()> {
        let Target {
            base_url,
            model,
            seed,
            ..
        } = &self.target;
        output.line(ceilings)?;
        output.line(format_args!("{model} at {base_url}, seed {seed}"))?;
        output.line(LevelResult::HEADER)
    }

    /// All rounds of one number of streams. A first round warms up and is thrown away.
    async fn measure(
        &self,
        num_streams: usize,
    ) -> anyhow::Result<(LevelResult, Option<StreamError>)> {
        let num_rounds = self.args.measure.rounds as u64;
        let mut rounds = Vec::new();
        for number in 0..=num_rounds {
            let raw = self.send(self.asks(num_streams, number), num_streams).await;
            let round = self.read(raw);
            if number > 0 {
                rounds.push(round);
            }
            if std::io::stderr().is_terminal() {
                eprintln!("{num_streams} streams: round {number} of {num_rounds}");
            }
        }
        self.summarise(num_streams, rounds)
    }

    /// The requests of a round: prompts that no other round has, behind a prefix that no other round has.
    fn asks(&self, num_streams: usize, round: u64) -> Vec<Ask> {
        let num_requests = self.args.requests.unwrap_or(num_streams.max(MIN_REQUESTS));
        let num_words = self.counts.in_prompt(self.args.prompt_tokens);
        let num_shared = self.counts.in_part(self.args.shared_prefix).min(num_words);
        let of_round = [self.target.seed, num_streams as u64, round];
        let prefix = words(&mut Noise::of(&of_round), num_shared);
        let ask = |index: usize| {
            let of_request = [&of_round[..], &[index as u64 + 1]].concat();
            let own = words(&mut Noise::of(&of_request), num_words - num_shared);
            Ask {
                model: self.target.model.clone(),
                prompt: format!("{prefix} {own}").trim().to_owned(),
                num_output: self.args.output_tokens,
            }
        };
        (0..num_requests).map(ask).collect()
    }

    /// Sends all, at most `num_streams` at once.
    async fn send(
        &self,
        asks: Vec<Ask>,
        num_streams: usize,
    ) -> Vec<Result<RawStream, StreamError>> {
        futures_util::stream::iter(&asks)
            .map(|ask| self.endpoint.stream(ask))
            .buffer_unordered(num_streams)
            .collect()
            .await
    }

    fn read(&self, raw: Vec<Result<RawStream, StreamError>>) -> Round {
        let mut round = Round {
            timings: Vec::new(),
            failures: Vec::new(),
        };
        for raw in raw {
            match raw.and_then(|raw| self.endpoint.timing(&raw)) {
                Ok(timing) => round.timings.push(timing),
                Err(failure) => round.failures.push(failure),
            }
        }
        round
    }

    /// Rates are medians over rounds, latencies percentiles over all requests of all rounds.
    fn summarise(
        &self,
        num_streams: usize,
        rounds: Vec<Round>,
    ) -> anyhow::Result<(LevelResult, Option<StreamError>)> {
        let rates: Vec<Rates> = rounds
            .iter()
            .filter_map(|round| Rates::of(&round.timings))
            .collect();
        let of_rates = |rate: fn(&Rates) -> f64| Samples::new(rates.iter().map(rate).collect());
        let (timings, failures) = flatten(rounds);
        let of_timings =
            |value: fn(&Timing) -> f64| Samples::new(timings.iter().map(value).collect());
        let (Some(output), Some(total), Some(computed), Some(ttft), Some(prompt), Some(cached)) = (
            of_rates(|rates| rates.output),
            of_rates(|rates| rates.output + rates.prompt),
            of_rates(|rates| rates.computed_prompt),
            of_timings(Timing::ttft),
            of_timings(|timing| timing.num_prompt as f64),
            of_timings(|timing| timing.num_cached as f64),
        ) else {
            let num_failed = failures.len();
            let first = failures
                .into_iter()
                .next()
                .context("no round was measured")?;
            return Err(anyhow::Error::new(first).context(format!(
                "{num_streams} streams: all {num_failed} requests failed; the first"
            )));
        };
        let shares = self.shares(
            num_streams,
            output.spread().median,
            computed.spread().median,
        );
        let level = LevelResult {
            num_streams,
            num_requests: timings.len() + failures.len(),
            num_failed: failures.len(),
            prompt_tokens: prompt.percentile(0.5),
            cached_tokens: cached.percentile(0.5),
            output_tokens_per_s: output.spread(),
            total_tokens_per_s: total.spread(),
            ttft_s: ttft.latency(),
            itl_s: Samples::new(timings.iter().flat_map(Timing::gaps).collect())
                .map(|gaps| gaps.latency()),
            share_of_bandwidth: shares.map(|(bandwidth, _)| bandwidth),
            share_of_peak: shares.map(|(_, peak)| peak),
        };
        Ok((level, failures.into_iter().next()))
    }

    /// Of the bandwidth, if every step served all streams and nothing was prefilled; of the peak of products.
    fn shares(&self, num_streams: usize, output: f64, computed_prompt: f64) -> Option<(f64, f64)> {
        let (cost, ceilings) = self.limits.as_ref()?;
        let bytes = output / num_streams as f64 * cost.weight_bytes as f64;
        let macs = output * cost.macs() as f64 + computed_prompt * cost.layer_macs as f64;
        Some((
            bytes / ceilings.read(),
            macs / ceilings.macs(cost.is_quantised),
        ))
    }
}

/// Tokens per second of one round.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Rates {
    output: f64,
    prompt: f64,
    /// Those of the prompt that came from no cache.
    computed_prompt: f64,
}

impl Rates {
    /// None when no request was answered.
    fn of(timings: &[Timing]) -> Option<Self> {
        let sent: Instant = timings.iter().map(|timing| timing.sent).min()?;
        let end: Instant = timings.iter().map(Timing::end).max()?;
        let span = (end - sent).as_secs_f64();
        let rate =
            |tokens: fn(&Timing) -> u64| timings.iter().map(tokens).sum::<u64>() as f64 / span;
        Some(Rates {
            output: rate(|timing| timing.num_output),
            prompt: rate(|timing| timing.num_prompt),
            computed_prompt: rate(|timing| timing.num_prompt.saturating_sub(timing.num_cached)),
        })
    }
}

fn flatten(rounds: Vec<Round>) -> (Vec<Timing>, Vec<StreamError>) {
    let (mut timings, mut failures) = (Vec::new(), Vec::new());
    for round in rounds {
        timings.extend(round.timings);
        failures.extend(round.failures);
    }
    (timings, failures)
}

impl LevelResult {
    const HEADER: &str = "streams  requests  failed  prompt  cached  output tok/s  total tok/s  TTFT p50/p99 ms    ITL p50/p99 ms  % of read  % of peak";

    fn line(&self) -> String {
        let millis =
            |latency: Latency| format!("{:.1}/{:.1}", latency.p50 * 1e3, latency.p99 * 1e3);
        format!(
            "{:>7}  {:>8}  {:>6}  {:>6}  {:>6}  {:>12.1}  {:>11.1}  {:>15}  {:>16}  {:>9}  {:>9}",
            self.num_streams,
            self.num_requests,
            self.num_failed,
            self.prompt_tokens,
            self.cached_tokens,
            self.output_tokens_per_s.median,
            self.total_tokens_per_s.median,
            millis(self.ttft_s),
            self.itl_s.map_or_else(|| "-".to_owned(), millis),
            percent(self.share_of_bandwidth),
            percent(self.share_of_peak),
        )
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn rates_are_over_the_span_of_the_round() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let timing = |sent, arrivals: &[u64]| Timing {
            sent: at(sent),
            arrivals: arrivals.iter().copied().map(at).collect(),
            num_prompt: 10,
            num_cached: 4,
            num_output: 6,
        };
        let rates = Rates::of(&[timing(1, &[2, 3]), timing(0, &[1, 2]), timing(1, &[3, 4])]);
        let expected = Rates {
            output: 4.5,
            prompt: 7.5,
            computed_prompt: 4.5,
        };
        assert_eq!(rates, Some(expected));
        assert_eq!(Rates::of(&[]), None);
    }
}
