//! Trains a small character-level transformer on Shakespeare three times, to show what the causal mask and the scale 1/√d are for:
//!
//! - **no mask**: each character sees the one it should predict. The training loss falls towards 0, and what it writes is garbage.
//! - **no scale**: scores of variance d make softmax pick one key, of which little gradient comes back. The entropy of attention is near 0
//!   from the first step on, and the loss lags behind for good; with layer norm and Adam it doesn't stop.
//! - **both**: it learns.
//!
//! `record.txt` has what 300 steps of each printed, and `curves.svg` their losses.
//!
//! ```sh
//! cargo run --release --example char_lm                           # all three, ten minutes on a software device
//! cargo run --release --example char_lm -- --only both --steps 3000 # as long as you like
//! cargo run --release --example char_lm -- --svg curves.svg       # where the loss curves go
//! ```

mod curves;
mod model;
mod ops;
#[cfg(test)]
mod tests;

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use tilewise::{Attention, Engine};

use curves::{Curve, Point};
use model::{Config, Model};

/// Plays of Shakespeare (Coriolanus, Richard III and part of Richard II), in the public domain.
const TEXT: &str = include_str!("shakespeare.txt");

/// Trains a character-level transformer with and without what attention needs.
#[derive(Debug, Parser)]
struct Args {
    /// One of the runs, instead of all three.
    #[arg(long)]
    only: Option<Variant>,
    /// Steps of training of each run.
    #[arg(long, default_value_t = 150)]
    steps: usize,
    /// Sequences of a step.
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Characters of a sequence.
    #[arg(long, default_value_t = 128)]
    length: usize,
    /// Elements of a token's vector.
    #[arg(long, default_value_t = 128)]
    dim: usize,
    /// Heads of attention.
    #[arg(long, default_value_t = 2)]
    heads: usize,
    /// Elements of a head: the more, the more the scores vary without the scale.
    #[arg(long, default_value_t = 128)]
    head_dim: usize,
    #[arg(long, default_value_t = 2)]
    layers: usize,
    /// The learning rate at its highest.
    #[arg(long, default_value_t = 3e-3)]
    rate: f32,
    /// Characters that each run writes at its end.
    #[arg(long, default_value_t = 400)]
    sample: usize,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Writes the curves as a picture.
    #[arg(long)]
    svg: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Variant {
    /// Attention without the causal mask.
    NoMask,
    /// Attention without the scale 1/√d.
    NoScale,
    /// Attention as it should be.
    Both,
}

impl Variant {
    fn name(self) -> &'static str {
        match self {
            Self::NoMask => "no mask",
            Self::NoScale => "no scale",
            Self::Both => "both",
        }
    }

    fn attention(self) -> Attention {
        match self {
            Self::NoMask => Attention::full(),
            Self::NoScale => Attention::causal().softmax_scale(1.0),
            Self::Both => Attention::causal(),
        }
    }
}

/// The text as numbers of its characters.
struct Text {
    characters: Vec<char>,
    training: Vec<u8>,
    held_out: Vec<u8>,
}

impl Text {
    fn new(text: &str) -> Result<Self> {
        let mut characters: Vec<char> = text.chars().collect();
        characters.sort_unstable();
        characters.dedup();
        let number = |c| u8::try_from(characters.binary_search(&c).unwrap_or_default()).context("too many characters");
        let mut training: Vec<u8> = text.chars().map(number).collect::<Result<_>>()?;
        let held_out = training.split_off(training.len() * 9 / 10);
        Ok(Self { characters, training, held_out })
    }

    /// Sequences from anywhere in a text, and for each character of theirs the next.
    fn batch(text: &[u8], batch: usize, length: usize, random: &mut fastrand::Rng) -> [Vec<u8>; 2] {
        let starts: Vec<usize> = (0..batch).map(|_| random.usize(..text.len() - length)).collect();
        [0, 1].map(|ahead| starts.iter().flat_map(|&at| text[at + ahead..][..length].iter().copied()).collect())
    }

    fn decode(&self, tokens: &[u8]) -> String {
        tokens.iter().map(|&token| self.characters[usize::from(token)]).collect()
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let engine = Engine::new()?;
    let text = Text::new(TEXT)?;
    ensure!(
        args.steps > 0
            && args.batch > 0
            && args.layers > 0
            && args.heads > 0
            && args.dim.is_multiple_of(2 * args.heads),
        "at least one step, sequence, layer and head, and --dim a multiple of twice --heads"
    );
    ensure!(
        args.head_dim.is_multiple_of(2),
        "--head-dim {}; accepted: an even number, as rope turns pairs",
        args.head_dim
    );
    ensure!((1..text.held_out.len()).contains(&args.length), "--length below {}", text.held_out.len());
    println!("{}", engine.describe_adapter());
    let runs = match args.only {
        Some(variant) => vec![variant],
        None => vec![Variant::NoMask, Variant::NoScale, Variant::Both],
    };
    let began = Instant::now();
    let curves: Vec<Curve> =
        runs.into_iter().map(|variant| run(&args, &engine, &text, variant)).collect::<Result<_>>()?;
    println!("\n{:.0} s", began.elapsed().as_secs_f64());
    if let Some(path) = &args.svg {
        std::fs::write(path, curves::svg(&curves)?).with_context(|| format!("{}", path.display()))?;
        println!("curves in {}", path.display());
    }
    Ok(())
}

/// Trains a model and has it write.
fn run(args: &Args, engine: &Engine, text: &Text, variant: Variant) -> Result<Curve> {
    let &Args { steps, batch, length, dim, heads, head_dim, layers, .. } = args;
    let config =
        Config { characters: text.characters.len(), dim, heads, head_dim, layers, attention: variant.attention() };
    let mut model = Model::new(engine, config, args.seed)?;
    let parameters: usize = model.parameters.iter().map(|parameter| parameter.value.elems()).sum();
    println!("\n=== {}: {parameters} parameters, {} characters of text", variant.name(), text.training.len());
    println!(
        "{:>5}  {:>7}  {:>8}  {:>6}  entropy of attention by layer (nats)",
        "step", "seconds", "training", "honest"
    );
    let began = Instant::now();
    // Every run sees the same text in the same order.
    let mut random = fastrand::Rng::with_seed(args.seed);
    let [held_out, held_out_next] = Text::batch(&text.held_out, batch, length, &mut fastrand::Rng::with_seed(0));
    // What it is worth where the future isn't there to be seen, as when it writes.
    let honest = match variant {
        Variant::NoMask => Attention::causal(),
        _ => variant.attention(),
    };
    let mut points = Vec::new();
    let mut smooth: Option<f32> = None;
    for step in 0..=steps {
        let [tokens, next] = Text::batch(&text.training, batch, length, &mut random);
        if step % (steps / 12).max(1) == 0 || step == steps {
            let training = smooth.map_or_else(|| model.loss(&tokens, &next, batch, &variant.attention()), Ok)?;
            let honest = model.loss(&held_out, &held_out_next, batch, &honest)?;
            let entropy = model.entropy(&held_out, batch)?;
            let shown: Vec<String> = entropy.iter().map(|entropy| format!("{entropy:.2}")).collect();
            let seconds = began.elapsed().as_secs_f64();
            println!("{step:>5}  {seconds:>7.1}  {training:>8.3}  {honest:>6.3}  {}", shown.join("  "));
            std::io::stdout().flush()?;
        }
        if step < steps {
            let loss = model.train(&tokens, &next, batch, rate(args, step))?;
            smooth = Some(smooth.map_or(loss, |smooth| 0.9 * smooth + 0.1 * loss));
            points.push(Point { step, loss });
        }
    }
    let written = write(&model, text, args)?;
    println!("--- it writes:\n{}", text.decode(&written));
    Ok(Curve { variant, points })
}

/// The learning rate: up for a while, then down to a tenth along a cosine.
fn rate(args: &Args, step: usize) -> f32 {
    let done = step as f32 / args.steps as f32;
    let warm = (done / 0.05).min(1.0);
    args.rate * warm * (0.55 + 0.45 * (core::f32::consts::PI * done).cos())
}

/// Characters one after the other, each drawn by what the model expects after those before it.
fn write(model: &Model, text: &Text, args: &Args) -> Result<Vec<u8>> {
    let mut random = fastrand::Rng::with_seed(args.seed);
    let mut tokens = text.held_out[..32.min(args.length)].to_vec();
    let given = tokens.len();
    for _ in 0..args.sample {
        let context = &tokens[tokens.len().saturating_sub(args.length)..];
        let logits = model.forward(context, 1, &model.config.attention)?.logits;
        let last = logits.slice(0, context.len() - 1..context.len())?.read()?;
        // A little less than it expects of what it expects little: temperature 0.8.
        let largest = last.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = last.iter().map(|x| ((x - largest) / 0.8).exp()).collect();
        let mut left = random.f32() * weights.iter().sum::<f32>();
        let drawn = weights.iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        tokens.push(u8::try_from(drawn.unwrap_or(weights.len() - 1))?);
    }
    Ok(tokens.split_off(given))
}
