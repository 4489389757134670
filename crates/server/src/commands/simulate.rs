//! `millpond simulate`: a trace or a made-up workload in, a report out. The scheduler is the one that serves.

mod hit_rate;
mod html;
mod summary;
pub mod sweep;
mod text;
pub mod traces;

use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use millpond_scheduler::config::Role;
use millpond_scheduler::sim::cost_model::{CostModel, PRESETS, preset};
use millpond_scheduler::sim::faults::FaultRates;
use millpond_scheduler::sim::link::LinkSpeed;
use millpond_scheduler::sim::report::Slo;
use millpond_scheduler::sim::scenario::Scenario;
use millpond_scheduler::sim::simulation::{Progress, Simulation, SimulationConfig, Watch};
use millpond_scheduler::sim::worker::{CheckEvery, Stand, WorkerConfig};
use millpond_scheduler::sim::workload::{Generator, Lengths, Workload};
use millpond_scheduler::{SchedulerConfig, Span, Timestamp};

use crate::cli::{
    ArrivalArgs, Format, GeneratorKind, SimulateArgs, SimulateOutputArgs, WorkerArgs,
};
use summary::Summary;
use traces::{Trace, TraceSource};

/// Blocks where neither the flags nor the preset say how many.
const DEFAULT_KV_TOKENS: u64 = 65_536;

/// Steps between two full checks of the invariants, as in production.
const CHECK_EVERY: CheckEvery = CheckEvery(1_000);

/// Runs the command; `given` is the command line it came from.
pub fn run(args: &SimulateArgs, given: &[OsString]) -> anyhow::Result<()> {
    if let Some(seed) = args.faults.scenario {
        return scenario(seed, &args.output);
    }
    if args.hit_rate {
        return hit_rate::run(args);
    }
    let variants = sweep::variants(given, &args.sweep)?;
    let trace = args
        .arrivals
        .trace_source()
        .map(|source| source.read())
        .transpose()?;
    let runs = variants.iter().map(|(label, args)| {
        let label = match label.is_empty() {
            true => args.workers.describe(),
            false => label.clone(),
        };
        simulate(label, args, trace.as_ref())
    });
    let runs = runs.collect::<anyhow::Result<Vec<_>>>()?;
    let rendered = match args.output.format {
        Format::Text => text::render(&runs),
        Format::Json => match runs.as_slice() {
            [one] => json(one)?,
            several => json(several)?,
        },
        Format::Html => html::render(&runs)?,
    };
    args.output.write(&rendered)
}

fn json<T: serde::Serialize + ?Sized>(value: &T) -> anyhow::Result<String> {
    let text = serde_json::to_string_pretty(value).context("cannot write JSON")?;
    Ok(text + "\n")
}

/// One run.
fn simulate(label: String, args: &SimulateArgs, trace: Option<&Trace>) -> anyhow::Result<Summary> {
    let workload = args.arrivals.workload(trace)?;
    let config = args.config(&workload)?;
    let num_workers = config.workers.len();
    let bar = progress_bar(workload.num_requests() as u64);
    let mut log = EventLog::open(args.output.event_log.as_deref())?;
    let mut show = |progress: Progress| bar.set_position(progress.num_ended);
    let mut line = |line: &str| log.line(line);
    let watch = Watch {
        log: match args.output.event_log {
            Some(_) => Some(&mut line),
            None => None,
        },
        progress: Some(&mut show),
    };
    let report = Simulation::new(config, &workload, watch)?.run();
    bar.finish_and_clear();
    log.close()?;
    Ok(Summary::new(label, report?, num_workers))
}

/// One of the tests' scenarios, with its event log on standard output.
fn scenario(seed: u64, output: &SimulateOutputArgs) -> anyhow::Result<()> {
    let scenario = Scenario::new(seed);
    let text = RefCell::new(format!("{scenario}\n"));
    let mut line = |line: &str| {
        let mut text = text.borrow_mut();
        text.push_str(line);
        text.push('\n');
    };
    let outcome = scenario.run(Some(&mut line));
    output.write(&text.borrow())?;
    let report = outcome?;
    eprintln!(
        "seed {seed}: no invariant broken; {} requests ended, {} faults, log digest {:016x}",
        report.ended.total(),
        report.num_faults,
        report.digest
    );
    Ok(())
}

fn progress_bar(num_requests: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(num_requests), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("simulating [{bar:32}] {pos}/{len} requests {eta}");
    bar.with_style(
        style
            .expect("the template is a constant")
            .progress_chars("=> "),
    )
}

/// A file of events, or nothing.
struct EventLog {
    file: Option<BufWriter<File>>,
    failed: Option<std::io::Error>,
}

impl EventLog {
    fn open(path: Option<&Path>) -> anyhow::Result<Self> {
        let create = |path: &Path| {
            let file = File::create(path);
            file.with_context(|| format!("cannot write {}", path.display()))
        };
        Ok(EventLog {
            file: path.map(create).transpose()?.map(BufWriter::new),
            failed: None,
        })
    }

    fn line(&mut self, line: &str) {
        if let Some(file) = &mut self.file
            && let Err(error) = writeln!(file, "{line}")
        {
            self.failed.get_or_insert(error);
        }
    }

    fn close(self) -> anyhow::Result<()> {
        let flushed = self.file.map_or(Ok(()), |mut file| file.flush());
        self.failed
            .map_or(flushed, Err)
            .context("cannot write the event log")
    }
}

impl SimulateOutputArgs {
    /// Writes to the file that was asked for, or to standard output.
    pub fn write(&self, text: &str) -> anyhow::Result<()> {
        match &self.output {
            Some(path) => std::fs::write(path, text)
                .with_context(|| format!("cannot write {}", path.display())),
            None => std::io::stdout()
                .write_all(text.as_bytes())
                .context("cannot write to standard output"),
        }
    }

    fn slo(&self) -> Option<Slo> {
        let span = |duration: std::time::Duration| Span(duration.as_nanos() as u64);
        Some(Slo {
            ttft: span(self.slo_ttft?),
            tpot: span(self.slo_tpot?),
        })
    }
}

impl ArrivalArgs {
    /// The trace that is to be read, if any.
    pub fn trace_source(&self) -> Option<TraceSource> {
        Some(TraceSource {
            path: self.trace.clone()?,
            format: self.trace_format,
            limit: self.limit,
        })
    }

    fn workload(&self, trace: Option<&Trace>) -> anyhow::Result<Workload> {
        let workload = match (self.generate, trace) {
            (Some(kind), _) => self.generator(kind, trace).generate(self.seed),
            (None, Some(trace)) => trace.workload(),
            (None, None) => {
                anyhow::bail!("nothing arrives: name a trace, or --generate a workload")
            }
        };
        Ok(match self.generate {
            Some(_) => workload,
            None => workload.sped_up(self.speed),
        })
    }

    fn generator(&self, kind: GeneratorKind, trace: Option<&Trace>) -> Generator {
        let lengths = match trace {
            Some(trace) => Lengths::Sampled(trace.lengths()),
            None => Lengths::Uniform {
                prompt: (self.prompt_tokens.0, self.prompt_tokens.1),
                output: (self.output_tokens.0, self.output_tokens.1),
            },
        };
        let (rate, turns) = (self.rate, (self.turns.0, self.turns.1));
        let pause = Span(self.pause.as_nanos() as u64);
        match kind {
            GeneratorKind::Poisson => Generator::Poisson {
                rate,
                num_requests: self.requests,
                lengths,
            },
            GeneratorKind::Bursts => Generator::Bursts {
                size: self.burst,
                every: Span((1e9 / rate) as u64),
                num_bursts: self.requests.div_ceil(self.burst),
                lengths,
            },
            GeneratorKind::Chats => Generator::Chats {
                rate,
                num_sessions: self.requests,
                num_systems: self.systems,
                system_tokens: self.system_tokens,
                turns,
                think: pause,
                lengths,
            },
            GeneratorKind::Agents => Generator::Agents {
                rate,
                num_sessions: self.requests,
                system_tokens: self.system_tokens,
                turns,
                tool: pause,
                lengths,
            },
        }
    }
}

impl WorkerArgs {
    fn describe(&self) -> String {
        let workers = match (self.prefill_workers, self.decode_workers) {
            (Some(prefill), Some(decode)) => format!("{prefill} prefill + {decode} decode workers"),
            (_, _) => format!("{} aggregated", self.workers),
        };
        format!(
            "{workers}, {}, {} tokens a step",
            self.cost, self.max_batch_tokens
        )
    }

    /// The workers, each with its role.
    fn workers(&self) -> anyhow::Result<Vec<WorkerConfig>> {
        let (cost, kv_tokens) = cost_model(&self.cost)?;
        let decode_cost = match &self.decode_cost {
            Some(name) => cost_model(name)?.0,
            None => cost,
        };
        let kv_tokens = self.kv_tokens.or(kv_tokens).unwrap_or(DEFAULT_KV_TOKENS);
        let num_blocks = u32::try_from(kv_tokens / u64::from(self.block_size))
            .context("--kv-tokens is too large")?;
        let worker = |role| WorkerConfig {
            scheduler: SchedulerConfig {
                block_size: self.block_size,
                num_blocks,
                max_batch_tokens: self.max_batch_tokens,
                max_sequences: self.max_sequences,
                max_waiting: u32::MAX,
                max_context: self
                    .max_context
                    .unwrap_or(u32::try_from(kv_tokens).unwrap_or(u32::MAX)),
                prefix_cache: !self.no_prefix_cache,
                role,
                ..SchedulerConfig::default()
            },
            cost: match role {
                Role::Decode => decode_cost,
                Role::Aggregated | Role::Prefill => cost,
            },
        };
        let of = |role, count: u32| (0..count).map(move |_| role);
        let roles: Vec<Role> = match (self.prefill_workers, self.decode_workers) {
            (Some(prefill), Some(decode)) => of(Role::Prefill, prefill)
                .chain(of(Role::Decode, decode))
                .collect(),
            (_, _) => of(Role::Aggregated, self.workers).collect(),
        };
        Ok(roles.into_iter().map(worker).collect())
    }
}

/// A preset, or the file of a fitted model; with the KV tokens of the preset's machine.
fn cost_model(name: &str) -> anyhow::Result<(CostModel, Option<u64>)> {
    if let Some(preset) = preset(name) {
        let kv_tokens = preset.num_blocks.map(|blocks| u64::from(blocks) * 16);
        return Ok((preset.model, kv_tokens));
    }
    let text = std::fs::read_to_string(name).with_context(|| {
        let names = PRESETS.map(|preset| preset.name).join(", ");
        format!("--cost {name}: no preset ({names}), and no file that can be read")
    })?;
    let model = serde_json::from_str(&text).with_context(|| format!("--cost {name}"))?;
    Ok((model, None))
}

impl SimulateArgs {
    fn config(&self, workload: &Workload) -> anyhow::Result<SimulationConfig> {
        let last = workload.sessions.iter().map(|session| session.start).max();
        Ok(SimulationConfig {
            workers: self.workers.workers()?,
            link: LinkSpeed {
                bytes_per_second: self.workers.link_gb_per_s * 1e9,
                latency: Span((self.workers.link_latency_us * 1e3) as u64),
                bytes_per_token: self.workers.kv_bytes_per_token,
            },
            faults: FaultRates::MIXED.times(self.faults.faults),
            faults_until: last.unwrap_or(Timestamp(0)),
            settle_within: None,
            timeout: None,
            seed: self.arrivals.seed,
            stand: Stand::Script,
            check: CHECK_EVERY,
            slo: self.output.slo(),
        })
    }
}
