//! `millpond doctor`: whether this machine can serve, with what kernels, and what is missing. It changes nothing and
//! asks no network.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use millpond_engine::fetch::{self, Cache, Location};
use millpond_engine::kernels::cpu::Isa;
use millpond_engine::llm::MemoryPlan;
use millpond_engine::loader;
use serde::Serialize;

use super::inspect;
use super::lines::Lines;
use super::machine::{Machine, num_processors};
use super::model::{self, mebibytes};
use crate::cli::DoctorArgs;

/// Runs the command.
pub fn run(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let checkup = Checkup::of(args);
    let text = match args.json {
        true => format!("{:#}\n", serde_json::to_value(&checkup)?),
        false => checkup.to_text(),
    };
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(error.into()),
        Ok(()) | Err(_) => {}
    }
    Ok(match checkup.problems.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// All that was looked at.
#[derive(Debug, Serialize)]
struct Checkup {
    version: &'static str,
    machine: Machine,
    kernels: Kernels,
    cache: CacheFolder,
    model: Model,
    /// What prevents serving.
    problems: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Kernels {
    /// That kernels exist for, from the slowest to the fastest.
    instruction_sets: Vec<InstructionSet>,
    chosen: &'static str,
    num_threads: usize,
}

#[derive(Debug, Serialize)]
struct InstructionSet {
    name: &'static str,
    is_available: bool,
}

#[derive(Debug, Serialize)]
struct CacheFolder {
    /// None when the environment names none.
    folder: Option<PathBuf>,
    /// Why nothing can be fetched into it.
    problem: Option<String>,
}

#[derive(Debug, Serialize)]
struct Model {
    asked: String,
    #[serde(flatten)]
    state: ModelState,
}

#[derive(Debug, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
enum ModelState {
    /// The mock model.
    Builtin,
    /// On this disk, and we can run it.
    Present {
        path: PathBuf,
        /// Memory that it takes without keys and values.
        num_bytes: u64,
    },
    /// To be fetched on first use.
    NotFetched { num_bytes: Option<u64> },
    /// It cannot be served.
    Unusable { problem: String },
}

impl Checkup {
    fn of(args: &DoctorArgs) -> Self {
        let mut checkup = Checkup {
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::detect(),
            kernels: Kernels::of(args),
            cache: CacheFolder::of_environment(),
            model: Model {
                asked: args.model.clone(),
                state: ModelState::of(&args.model),
            },
            problems: Vec::new(),
        };
        checkup.problems = checkup.find_problems().into_iter().flatten().collect();
        checkup
    }

    fn find_problems(&self) -> [Option<String>; 3] {
        [
            self.kernels.problem(),
            self.model_problem(),
            self.memory_problem(),
        ]
    }

    fn model_problem(&self) -> Option<String> {
        match &self.model.state {
            ModelState::Builtin | ModelState::Present { .. } => None,
            // A folder that cannot be written does no harm while nothing has to be fetched.
            ModelState::NotFetched { .. } => {
                let problem = self.cache.problem.as_ref()?;
                Some(format!("the model must be fetched, but: {problem}"))
            }
            ModelState::Unusable { problem } => Some(problem.clone()),
        }
    }

    fn memory_problem(&self) -> Option<String> {
        let ModelState::Present { num_bytes, .. } = self.model.state else {
            return None;
        };
        let available = self.machine.available_bytes;
        (num_bytes > available).then(|| {
            format!(
                "the model takes {} without keys and values, and {} of memory are available",
                mebibytes(num_bytes),
                mebibytes(available)
            )
        })
    }

    fn to_text(&self) -> String {
        let mut lines = Lines::default();
        let machine = &self.machine;
        lines.add("millpond", self.version);
        lines.add("processor", &machine.processor);
        lines.add("features", machine.features.join(" "));
        lines.add("memory", describe_memory(machine));
        lines.add("kernels", self.kernels.describe());
        lines.add(
            "threads",
            format!(
                "{} of {} processors",
                self.kernels.num_threads, machine.num_processors
            ),
        );
        lines.add("cache folder", self.cache.describe());
        lines.add("model", self.model.describe());
        for problem in &self.problems {
            lines.add("problem", problem);
        }
        let verdict = if self.problems.is_empty() {
            "yes"
        } else {
            "no"
        };
        lines.add("can serve", verdict);
        lines.into_text()
    }
}

fn describe_memory(machine: &Machine) -> String {
    format!(
        "{}, {} available",
        mebibytes(machine.memory_bytes),
        mebibytes(machine.available_bytes)
    )
}

impl Kernels {
    fn of(args: &DoctorArgs) -> Self {
        let instruction_set = |isa: Isa| InstructionSet {
            name: isa.name(),
            is_available: isa.is_available(),
        };
        Kernels {
            instruction_sets: Isa::ALL.map(instruction_set).into(),
            chosen: args.isa.unwrap_or_else(Isa::best).name(),
            num_threads: args.threads.unwrap_or_else(num_processors),
        }
    }

    fn problem(&self) -> Option<String> {
        if self.num_threads == 0 {
            return Some("threads must be at least 1".to_owned());
        }
        let chosen = |set: &&InstructionSet| set.name == self.chosen && !set.is_available;
        let missing = self.instruction_sets.iter().find(chosen)?;
        Some(format!(
            "instruction set {} is not available on this processor",
            missing.name
        ))
    }

    /// `portable, avx2 (chosen), avx512 (not available here)`
    fn describe(&self) -> String {
        let describe = |set: &InstructionSet| {
            let note = match (set.name == self.chosen, set.is_available) {
                (false, true) => "",
                (true, true) => " (chosen)",
                (false, false) => " (not available here)",
                (true, false) => " (chosen, not available here)",
            };
            format!("{}{note}", set.name)
        };
        let described: Vec<String> = self.instruction_sets.iter().map(describe).collect();
        described.join(", ")
    }
}

impl CacheFolder {
    fn of_environment() -> Self {
        match Cache::from_environment() {
            Ok(cache) => CacheFolder {
                folder: Some(cache.folder().to_owned()),
                problem: cache.check_writable().err().map(|error| error.to_string()),
            },
            Err(error) => CacheFolder {
                folder: None,
                problem: Some(error.to_string()),
            },
        }
    }

    fn describe(&self) -> String {
        let folder = self.folder.as_ref().map(|folder| folder.display());
        match (folder, &self.problem) {
            (Some(folder), None) => format!("{folder}, writable"),
            (Some(folder), Some(problem)) => format!("{folder}, not writable: {problem}"),
            (None, problem) => format!("none: {}", problem.as_deref().unwrap_or_default()),
        }
    }
}

impl ModelState {
    fn of(spec: &str) -> Self {
        if spec == model::MOCK {
            return ModelState::Builtin;
        }
        match fetch::locate(spec) {
            Ok(Location::Here(path)) => ModelState::of_file(path),
            Ok(Location::Remote { num_bytes }) => ModelState::NotFetched { num_bytes },
            Err(error) => ModelState::Unusable {
                problem: error.to_string(),
            },
        }
    }

    fn of_file(path: PathBuf) -> Self {
        match needs(&path) {
            Ok(plan) => ModelState::Present {
                num_bytes: plan.weight_bytes + plan.workspace_bytes,
                path,
            },
            Err(problem) => ModelState::Unusable { problem },
        }
    }
}

/// The memory of a model, if we can run it.
fn needs(path: &Path) -> Result<MemoryPlan, String> {
    let inspection = loader::inspect(path).map_err(|error| error.to_string())?;
    let plan = inspect::memory_plan(path, &inspection);
    let problem = || {
        inspection
            .model
            .err()
            .unwrap_or_else(|| format!("{}: cannot be read", path.display()))
    };
    plan.ok_or_else(problem)
}

impl Model {
    fn describe(&self) -> String {
        let asked = &self.asked;
        match &self.state {
            ModelState::Builtin => format!("{asked}, needs no file"),
            ModelState::Present { path, num_bytes } => format!(
                "{asked}, present: {}, {} without keys and values",
                path.display(),
                mebibytes(*num_bytes)
            ),
            ModelState::NotFetched {
                num_bytes: Some(num_bytes),
            } => format!(
                "{asked}, not here yet: {} are fetched on first use",
                mebibytes(*num_bytes)
            ),
            ModelState::NotFetched { num_bytes: None } => {
                format!("{asked}, looked up on the Hugging Face Hub on first use")
            }
            ModelState::Unusable { problem } => format!("{asked}, unusable: {problem}"),
        }
    }
}
