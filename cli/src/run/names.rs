//! What the tensors of a file are called.

use anyhow::{Result, bail};

use crate::tensors::Tensors;

/// A boolean mask, or a bias if it holds floating-point numbers.
pub(super) const MASKS: [&str; 3] = ["mask", "attn_mask", "attention_mask"];
pub(super) const BIASES: [&str; 2] = ["bias", "attn_bias"];

/// Where the sequences of a packed batch start and end.
pub(super) const CU_SEQLENS_Q: [&str; 2] = ["cu_seqlens_q", "cu_seqlens"];
pub(super) const CU_SEQLENS_KV: [&str; 3] = ["cu_seqlens_kv", "cu_seqlens_k", "cu_seqlens"];

/// What goes by one name only, the results to compare with among it.
const OTHERS: [&str; 10] = ["q", "k", "v", "ranges", "alibi_slopes", "sinks", "kv_lens", "q_lens", "o", "lse"];

/// Tensors that change what attention means, and aren't built yet.
const NOT_BUILT: [&str; 5] = ["block_table", "past_key", "past_value", "nonpad_kv_seqlen", "position_ids"];

/// Results of other programs beside o and lse: they change nothing.
const RESULTS: [&str; 6] = ["y", "weights", "attn_weights", "qk_matmul_output", "present_key", "present_value"];

/// What `run` takes, for messages.
const ACCEPTED: &str = "q, k, v, mask (attn_mask, attention_mask), bias (attn_bias), ranges, alibi_slopes, sinks, kv_lens, q_lens, \
                        cu_seqlens_q and cu_seqlens_kv (cu_seqlens_k; cu_seqlens for both), o, lse";

/// What each is, for people.
pub(super) const HELP: &str = "\
Safetensors file of

  q, k, v          (batch, heads, length, dim), or as --axes says; without the batch for batch 1; F32, F16 or BF16

and, if need be,

  mask             true where the query may attend: BOOL, or integers of 0 and 1; also attn_mask, attention_mask
  bias             added to the scores; also attn_bias, or by one of the mask's names if it is floating-point
  ranges           (batch, heads, length, 2), integers: the first key that a row may see, and the one past its last
  alibi_slopes     (heads) or (batch, heads)
  sinks            (heads)
  kv_lens, q_lens  (batch): how many keys and queries of each batch entry count
  cu_seqlens_q, cu_seqlens_kv
                   where the sequences of a packed batch start and end: q, k and v are (tokens, heads, dim) then;
                   also cu_seqlens_k, or cu_seqlens for both
  o, lse           what to compare with: the error is shown, and a verdict on it

Mask and bias broadcast to (batch, heads, length, keys); their leading axes may be left out. Gradients (dq, dbias, ..) and
results of other programs (y, weights, ..) are ignored. Any other tensor is an error unless --ignore names it. A `scale` in
the file's metadata is used unless --scale is given";

fn is_taken(name: &str) -> bool {
    [&MASKS[..], &BIASES, &CU_SEQLENS_Q, &CU_SEQLENS_KV, &OTHERS].into_iter().flatten().any(|&taken| taken == name)
}

/// Whether a tensor can be left alone: a result, or the gradient of what is taken.
fn changes_nothing(name: &str) -> bool {
    RESULTS.contains(&name) || name.strip_prefix('d').is_some_and(is_taken)
}

/// The tensors that change nothing. Any other that isn't taken is an error: attention without it could be something else.
pub(super) fn check<'a>(tensors: &'a Tensors<'_>) -> Result<Vec<&'a str>> {
    let (ignored, unknown): (Vec<_>, Vec<_>) =
        tensors.names().into_iter().filter(|name| !is_taken(name)).partition(|name| changes_nothing(name));
    let Some(first) = unknown.first() else { return Ok(ignored) };
    let not_built: Vec<_> = unknown.iter().copied().filter(|name| NOT_BUILT.contains(name)).collect();
    if not_built.is_empty() {
        bail!(
            "it holds {}: not known, and attention without could be something else; accepted: {ACCEPTED}; --ignore {first},.. \
             leaves tensors out",
            unknown.join(", ")
        )
    }
    bail!(
        "it holds {}: not built yet, and attention without is something else; --ignore {first},.. leaves tensors out",
        not_built.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_that_is_taken_is_told() {
        for text in [ACCEPTED, HELP] {
            let told: Vec<_> = text.split(|c: char| !(c.is_alphanumeric() || c == '_')).collect();
            for names in [&MASKS[..], &BIASES, &CU_SEQLENS_Q, &CU_SEQLENS_KV, &OTHERS] {
                assert!(names.iter().all(|name| told.contains(name)), "{names:?}");
            }
        }
    }

    #[test]
    fn results_and_gradients_change_nothing() {
        for name in ["do", "dlse", "dq", "dk", "dv", "dbias", "dsinks", "dattn_mask", "y", "present_key"] {
            assert!(changes_nothing(name) && !is_taken(name), "{name}");
        }
        for name in ["d", "dx", "key_padding_mask", "Mask", "masks", "ddq", "past_key", "mod_data", ""] {
            assert!(!changes_nothing(name) && !is_taken(name), "{name}");
        }
    }
}
