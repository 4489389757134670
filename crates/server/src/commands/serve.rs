//! `millpond serve`: loads a model, serves it, drains and ends.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use millpond_engine::llm::Llm;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{EXIT_ENGINE, model};
use crate::app::{App, ModelNames, unix_seconds};
use crate::cli::ServeArgs;
use crate::http::body::BodyBudget;
use crate::http::lifecycle::Lifecycle;
use crate::http::listener::{self, Server};
use crate::http::router::router;
use crate::live::LiveRequests;
use crate::openai::border::UnknownFields;
use crate::telemetry::metrics::Metrics;

/// Threads for parsing, templates and tokenization; more would only take turns.
const MAX_BLOCKING_THREADS: usize = 8;

/// How often to look whether the engine still lives.
const ENGINE_WATCH: Duration = Duration::from_secs(1);

/// A shell's code for an interrupted command.
const EXIT_INTERRUPTED: u8 = 130;

/// Runs the command.
pub fn run(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    let llm = model::load(
        &args.engine.model,
        args.engine.options(args.request_limits.limits()),
    )?;
    describe(&llm);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .max_blocking_threads(MAX_BLOCKING_THREADS)
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let code = runtime.block_on(serve(llm, args))?;
    // What is still blocked by then has been told to end.
    runtime.shutdown_background();
    Ok(code)
}

fn describe(llm: &Llm) {
    let info = llm.info();
    tracing::info!(
        model = info.name,
        architecture = info.architecture,
        max_context = info.max_context,
        isa = info.isa,
        threads = info.num_threads,
        fingerprint = info.fingerprint,
        "loaded"
    );
    tracing::info!("memory: {}", model::describe_memory(&info.memory));
}

async fn serve(llm: Llm, args: &ServeArgs) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::new().context("cannot listen for signals")?;
    let address = resolve(&args.host, args.port).await?;
    let listener =
        listener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
    let app = Arc::new(app(llm, args)?);
    announce(&app, listener.local_addr()?)?;
    let server = Server::new(Arc::clone(&app), router(Arc::clone(&app)));
    tokio::select! {
        never = server.accept(&listener) => match never {},
        name = signals.next() => tracing::info!(signal = name, "shutting down"),
        () = engine_end(&app.llm) => {
            tracing::error!("the engine has stopped");
            return Ok(ExitCode::from(EXIT_ENGINE));
        }
    }
    // New connections are still answered, with a refusal.
    tokio::select! {
        never = server.accept(&listener) => match never {},
        () = server.drain(args.drain_timeout) => Ok(ExitCode::SUCCESS),
        name = signals.next() => {
            tracing::warn!(signal = name, "ending at once");
            Ok(ExitCode::from(EXIT_INTERRUPTED))
        }
    }
}

/// The address of a host name or number.
async fn resolve(host: &str, port: u16) -> anyhow::Result<SocketAddr> {
    let mut addresses = tokio::net::lookup_host((host, port))
        .await
        .with_context(|| format!("cannot resolve {host}"))?;
    addresses
        .next()
        .with_context(|| format!("{host} has no address"))
}

fn app(llm: Llm, args: &ServeArgs) -> anyhow::Result<App> {
    let served = args
        .served_model_name
        .as_deref()
        .unwrap_or(&llm.info().name);
    let names = ModelNames {
        served: served.into(),
        asked: args.engine.model.as_str().into(),
    };
    Ok(App {
        metrics: Metrics::new(&llm, &names.served, !args.engine.no_prefix_cache)?,
        body_budget: BodyBudget::new(args.http_limits.max_total_body_bytes),
        limits: args.http_limits.clone(),
        unknown_fields: match args.strict {
            true => UnknownFields::Refuse,
            false => UnknownFields::Warn,
        },
        live: LiveRequests::default(),
        lifecycle: Lifecycle::default(),
        started: unix_seconds(),
        names,
        llm,
    })
}

/// One line on standard output, for people and for scripts that look for the port.
fn announce(app: &App, address: SocketAddr) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "serving {} on http://{address}", app.names.served)?;
    stdout.flush()
}

/// Returns once the engine thread has ended by itself.
async fn engine_end(llm: &Llm) {
    while llm.stats().alive {
        tokio::time::sleep(ENGINE_WATCH).await;
    }
}

/// The signals that end a server.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// The name of the next one.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
