//! `millpond inspect`: what a model file or folder holds, and what memory it would take.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use millpond_engine::config::ModelConfig;
use millpond_engine::llm::{EngineOptions, MemoryPlan};
use millpond_engine::loader::inspect::{FileFormat, TensorSummary};
use millpond_engine::loader::{self, Inspection};
use millpond_engine::model::{MemoryNeeds, StepLimits};
use millpond_scheduler::config::BLOCK_SIZE;
use serde_json::{Value, json};

use super::lines::Lines;
use super::model::{describe_memory, mebibytes};
use crate::cli::InspectArgs;

/// Runs the command.
pub fn run(args: &InspectArgs) -> anyhow::Result<ExitCode> {
    let inspection = loader::inspect(&args.path)?;
    let plan = memory_plan(&args.path, &inspection);
    let text = match args.json {
        true => format!("{:#}\n", to_json(&inspection, plan)),
        false => to_text(&inspection, plan, args.tensors),
    };
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        Ok(()) | Err(_) => Ok(ExitCode::SUCCESS),
    }
}

/// The memory for one sequence of full length; `None` for a model that we cannot run.
pub fn memory_plan(path: &Path, inspection: &Inspection) -> Option<MemoryPlan> {
    let config = inspection.model.as_ref().ok()?;
    let files = loader::open(path).ok()?;
    let limits = StepLimits {
        max_batch_tokens: EngineOptions::default().max_batch_tokens,
        max_context: config.max_context,
    };
    let needs = MemoryNeeds::of(config, &files.weights, limits);
    Some(needs.plan(config.max_context.div_ceil(BLOCK_SIZE)))
}

fn to_text(inspection: &Inspection, plan: Option<MemoryPlan>, list_tensors: bool) -> String {
    let mut lines = Lines::default();
    lines.add("name", &inspection.name);
    lines.add("format", format_name(inspection.format));
    lines.add_if("architecture", inspection.architecture.as_ref());
    lines.add_if("licence", inspection.license.as_ref());
    lines.add_if("context", inspection.context_length);
    lines.add(
        "parameters",
        format!(
            "{} in {} tensors, {}",
            inspection.num_parameters(),
            inspection.tensors.len(),
            mebibytes(inspection.num_bytes())
        ),
    );
    for (name, totals) in inspection.types() {
        let value = format!(
            "{} in {} tensors, {}",
            totals.num_parameters,
            totals.num_tensors,
            mebibytes(totals.num_bytes)
        );
        lines.add(&format!("  {name}"), value);
    }
    add_text_parts(inspection, &mut lines);
    add_run(inspection, plan, &mut lines);
    if list_tensors {
        for tensor in &inspection.tensors {
            lines.add("tensor", describe_tensor(tensor));
        }
    }
    lines.into_text()
}

fn add_text_parts(inspection: &Inspection, lines: &mut Lines) {
    let tokenizer = inspection.tokenizer.as_ref();
    let tokenizer = tokenizer.map(|found| format!("{}, {} tokens", found.kind, found.num_tokens));
    lines.add("tokenizer", tokenizer.as_deref().unwrap_or("none"));
    let template = if inspection.has_chat_template {
        "yes"
    } else {
        "no"
    };
    lines.add("chat template", template);
    lines.add("fingerprint", &inspection.fingerprint);
}

fn add_run(inspection: &Inspection, plan: Option<MemoryPlan>, lines: &mut Lines) {
    match &inspection.model {
        Ok(config) => lines.add("runs", describe_config(config)),
        Err(problem) => lines.add("runs", format!("no: {problem}")),
    }
    if let Some(plan) = plan {
        lines.add("memory", describe_memory(&plan));
    }
}

fn describe_config(config: &ModelConfig) -> String {
    format!(
        "yes: {} layers of width {}, {} query and {} key heads of width {}, vocabulary {}",
        config.layers.len(),
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size
    )
}

fn describe_tensor(tensor: &TensorSummary) -> String {
    format!("{} {} {:?}", tensor.name, tensor.type_name, tensor.shape)
}

fn format_name(format: FileFormat) -> &'static str {
    match format {
        FileFormat::Gguf => "gguf",
        FileFormat::Safetensors => "safetensors",
    }
}

fn to_json(inspection: &Inspection, plan: Option<MemoryPlan>) -> Value {
    let types = inspection.types().into_iter().map(|(name, totals)| {
        let totals = json!({
            "num_tensors": totals.num_tensors,
            "num_parameters": totals.num_parameters,
            "num_bytes": totals.num_bytes,
        });
        (name.to_owned(), totals)
    });
    json!({
        "path": inspection.path,
        "name": inspection.name,
        "format": format_name(inspection.format),
        "architecture": inspection.architecture,
        "license": inspection.license,
        "context_length": inspection.context_length,
        "num_parameters": inspection.num_parameters(),
        "num_bytes": inspection.num_bytes(),
        "types": types.collect::<serde_json::Map<_, _>>(),
        "tokenizer": inspection.tokenizer.as_ref().map(|found| json!({
            "kind": found.kind,
            "num_tokens": found.num_tokens,
        })),
        "has_chat_template": inspection.has_chat_template,
        "fingerprint": inspection.fingerprint,
        "model": inspection.model.as_ref().ok().map(config_to_json),
        "unsupported": inspection.model.as_ref().err(),
        "memory": plan.map(plan_to_json),
        "tensors": inspection.tensors.iter().map(tensor_to_json).collect::<Vec<_>>(),
    })
}

fn config_to_json(config: &ModelConfig) -> Value {
    json!({
        "num_layers": config.layers.len(),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_context": config.max_context,
    })
}

fn plan_to_json(plan: MemoryPlan) -> Value {
    json!({
        "weight_bytes": plan.weight_bytes,
        "kv_bytes": plan.kv_bytes,
        "workspace_bytes": plan.workspace_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "num_blocks": plan.num_blocks,
        "block_size": plan.block_size,
    })
}

fn tensor_to_json(tensor: &TensorSummary) -> Value {
    json!({
        "name": tensor.name,
        "type": tensor.type_name,
        "shape": tensor.shape,
        "num_bytes": tensor.num_bytes,
    })
}
