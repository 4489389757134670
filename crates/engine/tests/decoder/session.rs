//! `Session`: drives a real model through plans made by hand, so that a test decides what shares a step.
//!
//! It stands in for the scheduler: block tables, chunks and fork copies are the test's choice.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{Device, Tensor};
use millpond_engine::fetch;
use millpond_engine::kernels::cpu::{CpuKernels, Isa, KvData};
use millpond_engine::kv_pool::KvPool;
use millpond_engine::loader;
use millpond_engine::model::{Decoder, MAX_HEAD_ROWS};
use millpond_engine::runner::DecoderRunner;
use millpond_scheduler::{
    BatchPlan, BlockCopy, BlockId, CacheSalt, Deadlines, ModelOutput, ModelRunner, OutputRow,
    Request, RequestId, Row, SamplingParams, SequenceId, Span32, StartedSequence, StopConditions,
    Timestamp, TokenId,
};

const BLOCK_SIZE: usize = 16;
const MAX_BATCH_TOKENS: u32 = 2048;

/// How a session runs; none of it may change a result.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub num_threads: usize,
    pub isa: Option<Isa>,
    /// Order in which blocks are handed out.
    pub block_seed: u64,
    pub num_blocks: u32,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            num_threads: 1,
            isa: None,
            block_seed: 0,
            num_blocks: 512,
        }
    }
}

/// A model with its pool and the sequences that a test put on it.
pub struct Session {
    runner: DecoderRunner,
    pub tracks: Vec<Track>,
    free: Vec<BlockId>,
    ended: Vec<SequenceId>,
    copies: Vec<BlockCopy>,
    step: u64,
    vocab_size: usize,
}

/// One sequence: its known tokens and how many of them are computed.
#[derive(Clone)]
pub struct Track {
    pub id: SequenceId,
    request: Arc<Request>,
    pub tokens: Vec<TokenId>,
    blocks: Vec<BlockId>,
    pub num_computed: usize,
    started: bool,
}

/// A share of a step: the next `num_tokens` uncomputed tokens of a track.
#[derive(Clone, Copy, Debug)]
pub struct Feed {
    pub track: usize,
    pub num_tokens: usize,
}

impl Session {
    /// Opens a model file or folder.
    pub fn open(path: &Path, setup: Setup) -> Self {
        let runner = open_runner(path, setup);
        Session {
            vocab_size: runner.config().vocab_size,
            runner,
            tracks: Vec::new(),
            free: shuffled(setup.num_blocks, setup.block_seed),
            ended: Vec::new(),
            copies: Vec::new(),
            step: 0,
        }
    }

    /// Adds a sequence and returns its index in `tracks`.
    pub fn add(&mut self, prompt: &[TokenId], sampling: SamplingParams) -> usize {
        let index = self.tracks.len();
        let id = index as u64;
        self.tracks.push(Track {
            id: SequenceId(id),
            request: Arc::new(request(id, prompt, sampling)),
            tokens: prompt.to_vec(),
            blocks: Vec::new(),
            num_computed: 0,
            started: false,
        });
        index
    }

    /// Adds a sequence that shares what `parent` has computed: full blocks by reference, the last one by copy.
    pub fn fork(&mut self, parent: usize) -> usize {
        let index = self.tracks.len();
        let mut track = self.tracks[parent].clone();
        track.id = SequenceId(index as u64);
        track.started = false;
        track
            .blocks
            .truncate(track.num_computed.div_ceil(BLOCK_SIZE));
        if !track.num_computed.is_multiple_of(BLOCK_SIZE) {
            let from = track.blocks.pop().expect("a partial block");
            let to = self.free.pop().expect("a free block");
            let num_tokens = (track.num_computed % BLOCK_SIZE) as u32;
            self.copies.push(BlockCopy {
                from,
                to,
                num_tokens,
            });
            track.blocks.push(to);
        }
        self.tracks.push(track);
        index
    }

    /// Drops what is computed; the track starts again in the next step, its output kept.
    pub fn preempt(&mut self, track: usize) {
        let track = &mut self.tracks[track];
        self.ended.push(track.id);
        self.free.splice(0..0, track.blocks.drain(..));
        track.num_computed = 0;
        track.started = false;
    }

    /// Ends a track and takes its blocks back.
    pub fn end(&mut self, track: usize) {
        self.preempt(track);
    }

    /// Replaces a track's computed blocks by copies of blocks that nobody wrote.
    pub fn poison(&mut self, track: usize) {
        for block in &self.tracks[track].blocks {
            let from = *self.free.first().expect("a free block");
            let num_tokens = BLOCK_SIZE as u32;
            self.copies.push(BlockCopy {
                from,
                to: *block,
                num_tokens,
            });
        }
    }

    /// One step without sampling: logits after every fed token, feed after feed.
    pub fn logits(&mut self, feeds: &[Feed]) -> Vec<Vec<f32>> {
        let num_tokens = feeds.iter().map(|feed| feed.num_tokens as u32).sum();
        let mut rows = Vec::new();
        self.visit_logits(feeds, 0..num_tokens, &mut |row| rows.push(row.to_vec()));
        rows
    }

    /// One step without sampling: shows the logits after the `wanted` ones of the fed tokens, in order.
    pub fn visit_logits(
        &mut self,
        feeds: &[Feed],
        wanted: Range<u32>,
        visit: &mut dyn FnMut(&[f32]),
    ) {
        let plan = self.plan(feeds);
        self.runner.forward(&plan).expect("the step runs");
        for start in wanted.clone().step_by(MAX_HEAD_ROWS) {
            let end = wanted.end.min(start + MAX_HEAD_ROWS as u32);
            let logits = self.runner.logits(start..end);
            logits.chunks_exact(self.vocab_size).for_each(&mut *visit);
        }
        self.advance(feeds);
    }

    /// One step with sampling where a track's known tokens end; chosen tokens are appended to the tracks.
    pub fn execute(&mut self, feeds: &[Feed]) -> ModelOutput {
        let plan = self.plan(feeds);
        let mut output = ModelOutput::default();
        let step = self.runner.execute(&plan, &mut output);
        step.expect("the step runs");
        self.advance(feeds);
        for (feed, row) in feeds.iter().zip(&output.rows) {
            let tokens = output.row_tokens(row);
            self.tracks[feed.track].tokens.extend_from_slice(tokens);
        }
        output
    }

    /// Feeds what is known of every track, then decodes all together until each has `num_output` tokens.
    pub fn generate(&mut self, num_output: usize) -> Vec<Vec<TokenId>> {
        loop {
            let wants = |track: &Track| track.output().len() < num_output;
            let feeds: Vec<Feed> = (0..self.tracks.len())
                .filter(|index| wants(&self.tracks[*index]))
                .map(|track| Feed {
                    track,
                    num_tokens: self.tracks[track].num_uncomputed(),
                })
                .collect();
            if feeds.is_empty() {
                return self
                    .tracks
                    .iter()
                    .map(|track| track.output().to_vec())
                    .collect();
            }
            self.execute(&feeds);
        }
    }

    fn plan(&mut self, feeds: &[Feed]) -> BatchPlan {
        self.step += 1;
        let mut plan = BatchPlan {
            step: self.step,
            ended: std::mem::take(&mut self.ended),
            copies: std::mem::take(&mut self.copies),
            ..BatchPlan::default()
        };
        for feed in feeds {
            let track = &mut self.tracks[feed.track];
            let end = track.num_computed + feed.num_tokens;
            while track.blocks.len() * BLOCK_SIZE < end {
                track.blocks.push(self.free.pop().expect("a free block"));
            }
            plan.started.extend(track.start());
            plan.push_feed(track, end);
        }
        plan
    }

    fn advance(&mut self, feeds: &[Feed]) {
        for feed in feeds {
            self.tracks[feed.track].num_computed += feed.num_tokens;
        }
    }
}

impl Track {
    /// Tokens after the prompt.
    pub fn output(&self) -> &[TokenId] {
        &self.tokens[self.request.prompt.len()..]
    }

    pub fn num_uncomputed(&self) -> usize {
        self.tokens.len() - self.num_computed
    }

    fn start(&mut self) -> Option<StartedSequence> {
        let first = !std::mem::replace(&mut self.started, true);
        first.then(|| StartedSequence {
            id: self.id,
            request: Arc::clone(&self.request),
            choice: 0,
            output: self.output().to_vec(),
        })
    }
}

/// Opens a model file or folder. The pool starts full of NaN, so that a read of a slot nobody wrote shows.
pub fn open_runner(path: &Path, setup: Setup) -> DecoderRunner {
    let files = loader::open(path).expect("the model opens");
    let kernels = CpuKernels::new(setup.num_threads, setup.isa).expect("the kernels start");
    let max_positions = files.config.max_context.min(4096) as usize;
    let (config, weights) = (files.config, &files.weights);
    let decoder = Decoder::load(&kernels, config, weights, max_positions, &mut |_| {});
    let decoder = decoder.expect("the weights load");
    let mut kv = KvPool::new(decoder.config(), decoder.kv_type(), setup.num_blocks);
    poison(&mut kv);
    DecoderRunner::new(kernels, decoder, kv, MAX_BATCH_TOKENS)
}

/// Appends rows to a plan.
trait PushFeed {
    fn push_feed(&mut self, track: &Track, end: usize);
}

impl PushFeed for BatchPlan {
    fn push_feed(&mut self, track: &Track, end: usize) {
        let (tokens, blocks) = (self.tokens.len() as u32, self.blocks.len() as u32);
        self.tokens
            .extend_from_slice(&track.tokens[track.num_computed..end]);
        self.blocks.extend_from_slice(&track.blocks);
        let last_scored = end.min(track.request.prompt.len() - 1) as u32;
        let first = track.num_computed as u32;
        let scores = track.request.sampling.prompt_logprobs.is_some() && first < last_scored;
        self.rows.push(Row {
            sequence: track.id,
            first_position: first,
            tokens: Span32 {
                start: tokens,
                end: self.tokens.len() as u32,
            },
            blocks: Span32 {
                start: blocks,
                end: self.blocks.len() as u32,
            },
            sample: end == track.tokens.len(),
            prompt_logprobs: match scores {
                true => Span32 {
                    start: first,
                    end: last_scored,
                },
                false => Span32::default(),
            },
        });
    }
}

/// The log-probabilities that a step reported for a row's prompt tokens.
pub fn prompt_logprobs(output: &ModelOutput, row: &OutputRow) -> Vec<f32> {
    let scores = &output.prompt_logprobs[row.prompt_logprobs.range()];
    scores.iter().map(|score| score.chosen.logprob).collect()
}

/// Right answers, by name.
pub struct Expected(HashMap<String, Tensor>);

impl Expected {
    /// Reads `expected.safetensors` of a fixture folder.
    pub fn open(folder: &Path) -> Self {
        let path = folder.join("expected.safetensors");
        Expected(candle_core::safetensors::load(path, &Device::Cpu).expect("the fixture opens"))
    }

    pub fn ids(&self, name: &str) -> Vec<u32> {
        let ids = self
            .tensor(name)
            .flatten_all()
            .and_then(|tensor| tensor.to_vec1::<i64>());
        let ids = ids.expect("a tensor of ids").into_iter();
        ids.map(|id| u32::try_from(id).expect("an id")).collect()
    }

    pub fn tokens(&self, name: &str) -> Vec<TokenId> {
        self.ids(name).into_iter().map(TokenId).collect()
    }

    pub fn values(&self, name: &str) -> Vec<f32> {
        let values = self
            .tensor(name)
            .flatten_all()
            .and_then(|tensor| tensor.to_vec1::<f32>());
        values.expect("a tensor of floats")
    }

    fn tensor(&self, name: &str) -> &Tensor {
        self.0
            .get(name)
            .unwrap_or_else(|| panic!("the fixture has no {name}"))
    }
}

/// A folder under `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(name)
}

/// The real model of the tests, fetched when it is not there.
pub fn smollm2() -> PathBuf {
    fetch::resolve("smollm2-135m-instruct", &mut |_| {}).expect("the model can be fetched")
}

/// A small generator for schedules and block orders (SplitMix64), so that a failing seed can be repeated.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}

/// A request for up to 1,024 tokens, end-of-sequence tokens like any other.
pub fn request(id: u64, prompt: &[TokenId], sampling: SamplingParams) -> Request {
    Request {
        id: RequestId(id),
        prompt: prompt.into(),
        sampling,
        stop: StopConditions {
            max_tokens: 1024,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            eos_token_ids: Vec::new(),
            ignore_eos: true,
        },
        num_choices: 1,
        priority: 0,
        salt: CacheSalt::default(),
        arrival: Timestamp(0),
        deadlines: Deadlines::default(),
    }
}

fn shuffled(num_blocks: u32, seed: u64) -> Vec<BlockId> {
    let mut blocks: Vec<_> = (0..num_blocks).map(BlockId).collect();
    let mut random = Random(seed);
    for index in (1..blocks.len()).rev() {
        blocks.swap(index, random.below(index + 1));
    }
    blocks
}

fn poison(kv: &mut KvPool) {
    for layer in kv.layers_mut() {
        for data in [&mut layer.keys, &mut layer.values] {
            match data {
                KvData::F32(values) => values.fill(f32::NAN),
                KvData::F16(values) => values.fill(half::f16::NAN),
            }
        }
    }
}
