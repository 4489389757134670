//! Masks, bias and penalties: from raw logits to the logits that the filters see.
//!
//! Masked tokens are −∞ and stay so. No temperature and no probability here.
//! Repetition penalty: Keskar et al., "CTRL", arXiv 1909.05858; section 4.1.

use millpond_scheduler::{SamplingParams, TokenId};

use super::state::{Occurrence, SamplingState};

/// Does `state` leave raw logits as they are?
pub(super) fn is_identity(state: &SamplingState) -> bool {
    let params = state.params();
    params.allowed_token_ids.is_none()
        && params.logit_bias.is_empty()
        && state.unmet_minimum().is_none()
        && state.occurrences().is_empty()
}

/// Fills `adjusted` with `logits` after masks, bias and penalties. Ids beyond the vocabulary are ignored.
pub(super) fn adjust(logits: &[f32], state: &SamplingState, adjusted: &mut Vec<f32>) {
    let params = state.params();
    copy_allowed(logits, params.allowed_token_ids.as_deref(), adjusted);
    mask_stops(state, adjusted);
    for &(token, bias) in &params.logit_bias {
        edit(adjusted, token, |logit| logit + bias);
    }
    for occurrence in state.occurrences() {
        edit(adjusted, occurrence.token, |logit| {
            penalise(logit, occurrence, params)
        });
    }
}

fn copy_allowed(logits: &[f32], allowed: Option<&[TokenId]>, adjusted: &mut Vec<f32>) {
    adjusted.clear();
    let Some(allowed) = allowed else {
        adjusted.extend_from_slice(logits);
        return;
    };
    adjusted.resize(logits.len(), f32::NEG_INFINITY);
    for token in allowed {
        let index = token.0 as usize;
        if let (Some(slot), Some(logit)) = (adjusted.get_mut(index), logits.get(index)) {
            *slot = *logit;
        }
    }
}

/// While `min_tokens` is not reached, what would end the output may not be chosen.
fn mask_stops(state: &SamplingState, adjusted: &mut [f32]) {
    let Some(stop) = state.unmet_minimum() else {
        return;
    };
    let eos: &[TokenId] = if stop.ignore_eos {
        &[]
    } else {
        &stop.eos_token_ids
    };
    for token in eos.iter().chain(&stop.stop_token_ids) {
        if let Some(slot) = adjusted.get_mut(token.0 as usize) {
            *slot = f32::NEG_INFINITY;
        }
    }
}

fn penalise(logit: f32, occurrence: &Occurrence, params: &SamplingParams) -> f32 {
    let repeated = if logit > 0.0 {
        logit / params.repetition_penalty
    } else {
        logit * params.repetition_penalty
    };
    if occurrence.num_in_output == 0 {
        return repeated;
    }
    let frequency = params.frequency_penalty * occurrence.num_in_output as f32;
    repeated - frequency - params.presence_penalty
}

/// Changes the logit of `token` unless it is masked. The result stays finite: an extreme penalty is no mask.
fn edit(adjusted: &mut [f32], token: TokenId, change: impl FnOnce(f32) -> f32) {
    match adjusted.get_mut(token.0 as usize) {
        Some(slot) if *slot != f32::NEG_INFINITY => {
            *slot = change(*slot).clamp(f32::MIN, f32::MAX);
        }
        _masked_or_unknown => {}
    }
}
