//! From a path to a running engine: open, plan memory, pack weights, start the engine thread.

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;

use millpond_scheduler::config::BLOCK_SIZE;
use millpond_scheduler::mock::MockModel;
use millpond_scheduler::{ModelRunner, Scheduler, SchedulerConfig, TokenId};

use super::{EngineOptions, Inner, Llm, LoadFailure, MemoryPlan, ModelInfo};
use crate::driver::Driver;
use crate::driver::gauges::Gauges;
use crate::handle::EngineHandle;
use crate::kernels::cpu::CpuKernels;
use crate::kv_pool::KvPool;
use crate::loader::{self, ModelFiles};
use crate::model::{Decoder, MemoryNeeds, StepLimits};
use crate::runner::DecoderRunner;
use crate::text::chat_template::ChatTemplate;
use crate::text::tokenizer::Tokenizer;

/// The KV pool holds this many sequences of full length unless told otherwise …
const DEFAULT_FULL_SEQUENCES: u64 = 4;
/// … but no more tokens than this …
const DEFAULT_MAX_KV_TOKENS: u64 = 65_536;
/// … and no more than this share of the memory that is free at start.
const DEFAULT_KV_SHARE: f64 = 0.5;

/// Context of the mock model.
const MOCK_CONTEXT: u32 = 8_192;
/// Bits of a minted seed: every JSON client can send it back unchanged.
const SEED_BITS: u32 = 53;

/// A seed for a request that brings none.
pub(super) fn mint_seed() -> u64 {
    // Without a source of randomness every such request gets the same seed: reproducible, and it is returned.
    getrandom::u64().unwrap_or(0) >> (u64::BITS - SEED_BITS)
}

/// One line for people, from any error.
fn failed(error: impl std::fmt::Display) -> LoadFailure {
    LoadFailure(error.to_string())
}

pub(super) fn load(
    path: &Path,
    options: EngineOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Llm, LoadFailure> {
    check_threads(&options)?;
    let files = loader::open(path).map_err(failed)?;
    let tokenizer = Tokenizer::open(&files.tokenizer).map_err(failed)?;
    let template = chat_template(&files, &tokenizer)?;
    let num_threads = options.num_threads.unwrap_or_else(available_threads);
    let kernels = CpuKernels::new(num_threads, options.isa).map_err(failed)?;

    let wanted_context = options.max_context.unwrap_or(files.config.max_context);
    if wanted_context > files.config.max_context {
        return Err(LoadFailure(format!(
            "max-context {wanted_context} exceeds the {} tokens that the model was trained for",
            files.config.max_context
        )));
    }
    let limits = StepLimits {
        max_batch_tokens: options.max_batch_tokens,
        max_context: wanted_context,
    };
    let needs = MemoryNeeds::of(&files.config, &files.weights, limits);
    let memory = needs.plan(num_blocks(&options, wanted_context, &needs)?);
    let max_context = wanted_context.min(memory.num_blocks.saturating_mul(BLOCK_SIZE));

    let info = ModelInfo {
        name: model_name(path),
        architecture: files.config.architecture.clone(),
        max_context,
        vocab_size: files.config.vocab_size,
        fingerprint: format!("{}-cpu-{}", files.fingerprint, env!("CARGO_PKG_VERSION")),
        can_chat: template.is_some(),
        memory,
        isa: kernels.isa().to_string(),
        num_threads: kernels.num_threads(),
    };
    let eos_tokens = files.config.eos_tokens.clone();
    let runner = runner(
        files,
        kernels,
        StepLimits {
            max_context,
            ..limits
        },
        &memory,
        progress,
    )?;
    start(
        runner,
        Parts {
            tokenizer,
            template,
            info,
            eos_tokens,
        },
        options,
    )
}

pub(super) fn mock(options: EngineOptions) -> Result<Llm, LoadFailure> {
    check_threads(&options)?;
    let tokenizer = Tokenizer::bytes();
    let template = ChatTemplate::plain(&tokenizer).map_err(failed)?;
    let max_context = options.max_context.unwrap_or(MOCK_CONTEXT);
    let kv_tokens = options.kv_tokens.unwrap_or(DEFAULT_MAX_KV_TOKENS);
    let memory = MemoryPlan {
        num_blocks: blocks_of(kv_tokens)?,
        block_size: BLOCK_SIZE,
        ..MemoryPlan::default()
    };
    let vocab_size = tokenizer.num_tokens();
    let info = ModelInfo {
        name: "mock".to_owned(),
        architecture: "mock".to_owned(),
        max_context: max_context.min(memory.num_blocks.saturating_mul(BLOCK_SIZE)),
        vocab_size,
        fingerprint: format!("mock-{}", env!("CARGO_PKG_VERSION")),
        can_chat: true,
        memory,
        isa: "none".to_owned(),
        num_threads: 1,
    };
    let eos_tokens: Vec<TokenId> = tokenizer.eos().into_iter().collect();
    let vocabulary = u32::try_from(vocab_size).ok().and_then(NonZeroU32::new);
    let runner = MockModel::scripted(vocabulary.ok_or_else(|| failed("the mock has no tokens"))?);
    start(
        runner,
        Parts {
            tokenizer,
            template: Some(template),
            info,
            eos_tokens,
        },
        options,
    )
}

fn check_threads(options: &EngineOptions) -> Result<(), LoadFailure> {
    match options.num_threads {
        Some(0) => Err(failed("threads must be at least 1")),
        Some(_) | None => Ok(()),
    }
}

/// What an `Llm` is made of besides its engine thread.
struct Parts {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    info: ModelInfo,
    eos_tokens: Vec<TokenId>,
}

/// Starts the engine thread and hands out its remote control.
fn start<R: ModelRunner + Send + 'static>(
    runner: R,
    parts: Parts,
    options: EngineOptions,
) -> Result<Llm, LoadFailure> {
    let Parts {
        tokenizer,
        template,
        info,
        eos_tokens,
    } = parts;
    let config = SchedulerConfig {
        block_size: BLOCK_SIZE,
        num_blocks: info.memory.num_blocks,
        max_batch_tokens: options.max_batch_tokens,
        max_sequences: options.max_sequences,
        // The handle bounds what waits; preempted sequences wait besides.
        max_waiting: options.max_waiting.saturating_add(options.max_sequences),
        max_context: info.max_context,
        prefix_cache: options.prefix_cache,
        partial_copies: options.prefix_cache,
        ..SchedulerConfig::default()
    };
    let scheduler = Scheduler::new(config).map_err(failed)?;
    let gauges = Arc::new(Gauges::new(info.memory.num_blocks));
    let (commands, inbox) = mpsc::channel();
    let driver = Driver::new(
        scheduler,
        runner,
        tokenizer.clone(),
        inbox,
        Arc::clone(&gauges),
    );
    std::thread::Builder::new()
        .name("millpond-engine".to_owned())
        .spawn(move || driver.run())
        .map_err(failed)?;
    let handle = EngineHandle::new(commands, gauges, options.max_waiting);
    let limits = options.limits;
    let inner = Inner {
        handle,
        tokenizer,
        template,
        info,
        limits,
        eos_tokens,
    };
    Ok(Llm {
        inner: Arc::new(inner),
    })
}

fn runner(
    files: ModelFiles,
    kernels: CpuKernels,
    limits: StepLimits,
    memory: &MemoryPlan,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<DecoderRunner, LoadFailure> {
    let total = files.weights.num_bytes();
    let mut report = |done: u64| progress(done, total);
    let max_positions = limits.max_context as usize;
    let decoder = Decoder::load(
        &kernels,
        files.config,
        &files.weights,
        max_positions,
        &mut report,
    )
    .map_err(failed)?;
    let kv = KvPool::new(decoder.config(), decoder.kv_type(), memory.num_blocks);
    Ok(DecoderRunner::new(
        kernels,
        decoder,
        kv,
        limits.max_batch_tokens,
    ))
}

fn chat_template(
    files: &ModelFiles,
    tokenizer: &Tokenizer,
) -> Result<Option<ChatTemplate>, LoadFailure> {
    let compile = |source: &str| ChatTemplate::new(source, tokenizer).map_err(failed);
    files.chat_template.as_deref().map(compile).transpose()
}

/// Blocks of the KV pool: as asked, or what the defaults and the free memory allow.
fn num_blocks(
    options: &EngineOptions,
    max_context: u32,
    needs: &MemoryNeeds,
) -> Result<u32, LoadFailure> {
    if let Some(asked) = options.kv_tokens {
        return blocks_of(asked);
    }
    let full = u64::from(max_context) * DEFAULT_FULL_SEQUENCES;
    let wanted = full.clamp(1, DEFAULT_MAX_KV_TOKENS.max(u64::from(max_context)));
    let free = available_memory().saturating_sub(needs.weight_bytes + needs.workspace_bytes);
    let affordable = (free as f64 * DEFAULT_KV_SHARE) as u64 / needs.kv_bytes_per_token.max(1);
    if affordable < u64::from(BLOCK_SIZE) {
        let needed = needs.weight_bytes + needs.workspace_bytes;
        return Err(LoadFailure(format!(
            "not enough memory: weights and workspace take {needed} bytes, which leaves no room for keys and values"
        )));
    }
    blocks_of(wanted.min(affordable))
}

/// Whole blocks that hold `tokens`.
fn blocks_of(tokens: u64) -> Result<u32, LoadFailure> {
    let blocks = tokens.div_ceil(u64::from(BLOCK_SIZE));
    match u32::try_from(blocks) {
        Ok(blocks) if blocks > 0 => Ok(blocks),
        _ => Err(LoadFailure(format!(
            "kv-tokens {tokens} is not between 1 and {}",
            u32::MAX
        ))),
    }
}

fn available_threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Bytes that can be allocated without swapping.
fn available_memory() -> u64 {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    system.available_memory()
}

/// File name without its extension, or the folder's name.
fn model_name(path: &Path) -> String {
    let name = if path.is_dir() {
        path.file_name()
    } else {
        path.file_stem()
    };
    name.map_or_else(
        || "model".to_owned(),
        |name| name.to_string_lossy().into_owned(),
    )
}
