//! What a user's `score_mod` and `mask_mod` have to be, checked by naga within the kernel that they become part of.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use wgpu::naga;
use wgpu::naga::valid::GlobalUse;

use crate::error::{Error, Result};
use crate::problem::{Attention, MaskMod, ModText, ScoreMod};
use crate::shader::{Expanded, Library, Recipe, words};

const SCORE_MOD: Slot =
    Slot { name: "score_mod", signature: "fn score_mod(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32" };
const MASK_MOD: Slot =
    Slot { name: "mask_mod", signature: "fn mask_mod(b: u32, h: u32, q_idx: u32, kv_idx: u32) -> bool" };

impl ScoreMod {
    /// Takes WGSL that defines
    ///
    /// ```wgsl
    /// fn score_mod(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32
    /// ```
    ///
    /// for one score: of batch entry (or packed sequence) `b`, query head `h`, query row `q_idx`, key `kv_idx`. It runs after scale and
    /// softcap, before ALiBi and bias. Constants, types and further functions may stand beside it. It may call `data_f32(index)`,
    /// `data_u32(index)` and `data_i32(index)` for the words of [`crate::Inputs::mod_data`]; past their end they are 0. It is also
    /// called for rows and keys past the end and for masked ones, whose result has no effect. Prefer `select` to `if`: the text
    /// is compiled many times over, and some compilers take minutes over many branches. Loops are allowed; on a software device those
    /// of one tile, 64 calls, may make some tens of thousands of iterations, beyond which llvmpipe ends them. Names that the kernel says
    /// itself are refused outside functions: one with a prefix such as `my_` is safe. Both mods share their names. (The idea is that of Dong et al. 2024, `FlexAttention`.)
    ///
    /// ```
    /// use tilewise::{Attention, ScoreMod};
    /// // A learned bias for each head and distance, (heads, 2·128 + 1), beyond 128 that of 128: T5's, without buckets.
    /// let relative = ScoreMod::new(
    ///     "fn score_mod(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32 {
    ///          let distance = clamp(i32(kv_idx) - i32(q_idx), -128, 128);
    ///          return score + data_f32(h * 257u + u32(distance + 128));
    ///      }",
    /// )?;
    /// let options = Attention::full().score_mod(relative);
    /// # Ok::<(), tilewise::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] with naga's message and the line of `wgsl` that it is about.
    pub fn new(wgsl: &str) -> Result<Self> {
        let kernel = Recipe::new("flash_fwd").spec("MASK_MOD", true);
        Ok(Self { text: check(&SCORE_MOD, &kernel, wgsl)?, derivative: None })
    }

    /// The same with its derivative with respect to the score, which gradients take: WGSL that defines
    ///
    /// ```wgsl
    /// fn score_mod_derivative(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32
    /// ```
    ///
    /// All else is as for [`ScoreMod::new`]; what that text declares may be used. [`crate::Engine::attention_backward`] compares it with
    /// differences of `score_mod`, and refuses one that isn't its derivative; so does [`crate::Engine::check_derivative`], for those who
    /// record gradients themselves. What `mod_data` holds gets no gradient.
    ///
    /// ```
    /// use tilewise::ScoreMod;
    /// // A softcap of one's own.
    /// let capped = ScoreMod::new(
    ///     "const MY_CAP = 20.0;
    ///      fn my_tanh(x: f32) -> f32 { return 1.0 - 2.0 / (exp(2.0 * clamp(x, -15.0, 15.0)) + 1.0); }
    ///      fn score_mod(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32 {
    ///          return MY_CAP * my_tanh(score / MY_CAP);
    ///      }",
    /// )?
    /// .derivative(
    ///     "fn score_mod_derivative(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32 {
    ///          let t = my_tanh(score / MY_CAP);
    ///          return 1.0 - t * t;
    ///      }",
    /// )?;
    /// # Ok::<(), tilewise::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`ScoreMod::new`]; and for a text that declares a name which the first one says.
    pub fn derivative(self, wgsl: &str) -> Result<Self> {
        let kernel = Recipe::new("flash_bwd_dq")
            .slot("attention_params", "backward")
            .slot("extras", "words")
            .spec("MASK_MOD", true)
            .spec("SCORE_MOD", true)
            .text(SCORE_MOD.name, &self.text.wgsl);
        let derivative = check(&DERIVATIVE, &kernel, wgsl)?;
        match clash(&derivative, &self.text) {
            Some(name) => Err(Error::invalid(format!(
                "score_mod_derivative declares {name}, which score_mod says; accepted: names of its own"
            ))),
            None => Ok(Self { derivative: Some(derivative), ..self }),
        }
    }
}

impl MaskMod {
    /// Takes WGSL that defines
    ///
    /// ```wgsl
    /// fn mask_mod(b: u32, h: u32, q_idx: u32, kv_idx: u32) -> bool
    /// ```
    ///
    /// which is true where the query may attend. All else is as for [`ScoreMod::new`]. Tiles of which it leaves nothing are skipped,
    /// but the function is called for each of their keys: what can be said by [`crate::Inputs::ranges`] is cheaper.
    ///
    /// ```
    /// use tilewise::{Attention, MaskMod};
    /// // Documents packed into one sequence: mod_data holds the document of each token.
    /// let documents = MaskMod::new(
    ///     "fn mask_mod(b: u32, h: u32, q_idx: u32, kv_idx: u32) -> bool {
    ///          return data_u32(q_idx) == data_u32(kv_idx);
    ///      }",
    /// )?;
    /// let options = Attention::causal().mask_mod(documents);
    /// # Ok::<(), tilewise::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`ScoreMod::new`].
    pub fn new(wgsl: &str) -> Result<Self> {
        check(&MASK_MOD, &Recipe::new("flash_fwd").spec("MASK_MOD", true), wgsl).map(Self)
    }
}

/// Whether mods, each sound by itself, are so together: a name that one declares must mean nothing else in the other.
pub(crate) fn check_together(options: &Attention) -> Result<()> {
    let (Some(ScoreMod { text, derivative }), Some(MaskMod(mask_mod))) = (&options.score_mod, &options.mask_mod) else {
        return Ok(());
    };
    let names = [("score_mod", Some(text)), ("score_mod_derivative", derivative.as_ref())];
    for (what, text) in names.into_iter().filter_map(|(what, text)| Some((what, text?))) {
        if let Some(name) = clash(text, mask_mod).or_else(|| clash(mask_mod, text)) {
            return Err(Error::invalid(format!(
                "{what} and mask_mod both say {name}, which one of them declares; accepted: names of its own in each"
            )));
        }
    }
    Ok(())
}

/// A name that one text declares and another says.
fn clash(declares: &ModText, says: &ModText) -> Option<String> {
    declares.declares.intersection(&says.says).next().cloned()
}

const DERIVATIVE: Slot = Slot {
    name: "score_mod_derivative",
    signature: "fn score_mod_derivative(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32",
};

struct Slot {
    name: &'static str,
    signature: &'static str,
}

/// What of a kernel's module a user's text adds to or uses.
struct Parsed {
    module: naga::Module,
    info: naga::valid::ModuleInfo,
}

/// What a text may not call: all invocations have to get there, and mods are called where they don't.
const BARRIERS: [&str; 6] = [
    "workgroupBarrier",
    "storageBarrier",
    "textureBarrier",
    "subgroupBarrier",
    "workgroupUniformLoad",
    "controlBarrier",
];

/// What a text may not say: it would be about the whole kernel.
const DIRECTIVES: [&str; 3] = ["enable", "requires", "diagnostic"];

/// Words that a declaration begins with, and its name follows.
const DECLARES: [&str; 4] = ["fn", "const", "alias", "struct"];

/// What the kernel's functions for mods read. Their layout is no interface: it changes between versions.
const INTERNAL: [&str; 3] = ["params", "extra", "extras"];

/// Reads a text word by word, and refuses what naga would let pass.
fn check_words(slot: &Slot, text: &str) -> Result<ModText> {
    // WGSL ends lines, and so comments, at these too, and we don't.
    let odd = |char: char| {
        (char.is_control() && !"\n\t".contains(char)) || matches!(char, '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    if let Some(char) = text.replace("\r\n", "\n").chars().find(|&char| odd(char)) {
        return Err(Error::invalid(format!(
            "{}: the character {char:?}; accepted: text, tabs, ends of line",
            slot.name
        )));
    }
    let mut known = ModText { wgsl: text.into(), declares: BTreeSet::new(), says: BTreeSet::new(), has_loops: false };
    let (mut depth, mut declares) = (0_usize, false);
    for (line, word) in words(slot.name, text) {
        let refuse = |why: &str| Err(Error::invalid(format!("{}, line {line}: {why}", slot.name)));
        if BARRIERS.contains(&word.as_str()) {
            return refuse(&format!("{word}; accepted: functions of one invocation"));
        }
        if depth == 0 && matches!(word.as_str(), "var" | "override") {
            return refuse(&format!(
                "{word}; accepted: functions, constants, types, and numbers by Inputs::mod_data, which data_f32 reads"
            ));
        }
        if depth == 0 && DIRECTIVES.contains(&word.as_str()) {
            return refuse(&format!("{word}; accepted: functions, constants, types"));
        }
        // A name that the kernel says, in whichever variant, would mean something else in it; a predeclared one too.
        if depth == 0 && declares && word != slot.name && said_by_the_kernel().contains(&word) {
            return refuse(&format!("the name {word}, which the kernel uses; accepted: any other"));
        }
        if INTERNAL.contains(&word.as_str()) {
            return refuse(&format!("{word} of the kernel; accepted: its parameters and data_f32, data_u32, data_i32"));
        }
        if depth == 0 && declares && word != slot.name {
            known.declares.insert(word.clone());
        }
        known.has_loops |= matches!(word.as_str(), "for" | "while" | "loop");
        declares = DECLARES.contains(&word.as_str());
        match word.as_str() {
            "{" => depth += 1,
            "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
        known.says.insert(word);
    }
    Ok(known)
}

/// Every word of the kernel and of whatever it may include.
fn said_by_the_kernel() -> &'static BTreeSet<String> {
    static WORDS: OnceLock<BTreeSet<String>> = OnceLock::new();
    WORDS.get_or_init(|| {
        let files = Library::EMBEDDED
            .paths()
            .filter(|path| ["flash_fwd", "flash_bwd", "common/"].iter().any(|start| path.starts_with(start)));
        let texts = files.filter_map(|path| Library::EMBEDDED.file(path));
        texts.flat_map(|(path, text)| words(path, text)).map(|(_, word)| word).collect()
    })
}

/// Whether a mod of these options may run for long.
pub(crate) fn have_loops(options: &Attention) -> bool {
    let of_scores = options.score_mod.iter().flat_map(|it| core::iter::once(&it.text).chain(&it.derivative));
    of_scores.into_iter().any(|text| text.has_loops) || options.mask_mod.as_ref().is_some_and(|it| it.0.has_loops)
}

/// Checks a text by its words, and by naga within the kernel.
fn check(slot: &Slot, kernel: &Recipe, text: &str) -> Result<Arc<ModText>> {
    let known = check_words(slot, text)?;
    let before = parse(kernel, slot, text)?;
    let after = parse(&kernel.clone().text(slot.name, &known.wgsl), slot, text)?;
    if after.module.global_variables.len() != before.module.global_variables.len()
        || after.module.entry_points.len() != before.module.entry_points.len()
        || after.module.overrides.len() != before.module.overrides.len()
    {
        return Err(Error::invalid(format!(
            "{}: a variable, override or entry point of its own; accepted: functions, constants, types",
            slot.name
        )));
    }
    let own: BTreeSet<_> = before.module.functions.iter().filter_map(|(_, function)| function.name.clone()).collect();
    for (handle, function) in after.module.functions.iter() {
        let name = function.name.clone().unwrap_or_default();
        if own.contains(&name) && slot.name != name {
            continue;
        }
        for (variable, global) in after.module.global_variables.iter() {
            let used = after.info[handle][variable];
            let name_of = global.name.as_deref().unwrap_or_default();
            // data_* reads these.
            if used != GlobalUse::empty() && !matches!(name_of, "params" | "extras") {
                return Err(Error::invalid(format!(
                    "{}: {name} uses {name_of} of the kernel; accepted: its parameters and data_f32, data_u32, data_i32",
                    slot.name
                )));
            }
        }
    }
    Ok(Arc::new(known))
}

fn parse(recipe: &Recipe, slot: &Slot, text: &str) -> Result<Parsed> {
    let expanded = recipe.expand(Library::EMBEDDED)?;
    let source = &expanded.text;
    let module = naga::front::wgsl::parse_str(source).map_err(|error| {
        let line = error.location(source).map(|at| at.line_number);
        let span = error.labels().next().map(|(_, label)| label.to_owned()).unwrap_or_default();
        explain(&expanded, slot, text, line, &format!("{} {span}", error.message()))
    })?;
    let mut validator = naga::valid::Validator::new(
        naga::valid::ValidationFlags::all(),
        naga::valid::Capabilities::SHADER_FLOAT16_IN_FLOAT32,
    );
    let info = validator.validate(&module).map_err(|error| {
        // From the outermost to the innermost.
        let line = error.spans().last().map(|(span, _)| span.location(source).line_number);
        let mut message = error.to_string();
        let mut cause = core::error::Error::source(error.as_inner());
        while let Some(inner) = cause {
            message += &format!(": {inner}");
            cause = inner.source();
        }
        explain(&expanded, slot, text, line, &message)
    })?;
    Ok(Parsed { module, info })
}

/// The error about a line of the whole text, told by the line of the user's.
fn explain(expanded: &Expanded, slot: &Slot, text: &str, line: Option<u32>, message: &str) -> Error {
    let origin = line.and_then(|line| expanded.origin(line as usize));
    let message = message.trim();
    if let Some(origin) = origin.filter(|origin| origin.file == slot.name) {
        let code = text.lines().nth(origin.line as usize - 1).unwrap_or_default().trim();
        return Error::invalid(format!("{}, line {}: {message}\n  {code}", slot.name, origin.line));
    }
    // The kernel itself is sound: what it meets isn't what it calls, or is cut short.
    Error::invalid(format!(
        "the user's WGSL doesn't fit the kernel: {message}; accepted: text that defines `{}`",
        slot.signature
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(result: Result<impl Sized>) -> String {
        match result {
            Err(Error::Invalid(message)) => message,
            Err(other) => panic!("{other:?}"),
            Ok(_) => panic!("accepted"),
        }
    }

    /// A `score_mod` whose body is this.
    fn score(body: &str) -> Result<ScoreMod> {
        ScoreMod::new(&format!(
            "fn score_mod(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32 {{\n{body}\n}}"
        ))
    }

    #[test]
    fn sound_mods_are_accepted() {
        score("return score;").unwrap();
        score("return score + data_f32(h) * f32(data_i32(0u)) * f32(data_u32(q_idx));").unwrap();
        ScoreMod::new(
            "const CAP = 20.0; // @spec\nstruct Pair { a: f32, b: f32 }\nfn cap(x: f32) -> f32 { return Pair(CAP * tanh(x / CAP), x).a; }
             /* fn other */ fn score_mod(s: f32, batch: u32, head: u32, row: u32, key: u32) -> f32 { return cap(s); }",
        )
        .unwrap();
        MaskMod::new("fn mask_mod(b: u32, h: u32, q_idx: u32, kv_idx: u32) -> bool { return kv_idx <= q_idx; }")
            .unwrap();
    }

    /// The line is the snippet's own, and shown.
    #[test]
    fn errors_show_the_line_of_the_snippet() {
        let message = refused(score("let a = 1;\nreturn scor;"));
        assert!(message.contains("score_mod, line 3") && message.contains("return scor;"), "{message}");
        let message = refused(score("let a = 1.0;\nlet b2 = a * kv_idx;\nreturn score;"));
        assert!(message.contains("score_mod, line 3") && message.contains("a * kv_idx"), "{message}");
        let message = refused(score("return score +;"));
        assert!(message.contains("score_mod, line 2"), "{message}");
        let message = refused(score("return h;"));
        assert!(message.contains("score_mod, line"), "{message}");
        let message = refused(MaskMod::new(
            "fn mask_mod(b: u32, h: u32, q_idx: u32, kv_idx: u32) -> bool {\n  return data_f64(0u);\n}",
        ));
        assert!(message.contains("mask_mod, line 2") && message.contains("data_f64"), "{message}");
    }

    /// Nothing of the user's, or another signature than is called.
    #[test]
    fn texts_that_do_not_define_the_function() {
        let texts = [
            "",
            "// nothing",
            "fn score(score: f32) -> f32 { return score; }",
            "fn score_mod(score: f32) -> f32 { return score; }",
            "fn score_mod(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> u32 { return h; }",
            "fn score_mod(score: f32, b: i32, h: u32, q_idx: u32, kv_idx: u32) -> f32 { return score; }",
            "/* fn score_mod(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32 { return score; }",
            "fn score_mod(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32 {",
            "}",
            "\u{0}",
        ];
        for text in texts {
            let message = refused(ScoreMod::new(text));
            assert!(message.contains("score_mod"), "{text:?}: {message}");
        }
    }

    /// A snippet computes; what it could do to the kernel around it, it may not.
    #[test]
    fn mods_keep_to_themselves() {
        let with = |module: &str, body: &str| {
            ScoreMod::new(&format!(
                "{module}\nfn score_mod(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32 {{ {body} }}"
            ))
        };
        for (module, body) in [
            ("var<private> count: u32;", "return score;"),
            ("var<workgroup> shared_: f32;", "return score;"),
            ("@group(0) @binding(9) var<storage, read> mine: array<f32>;", "return score;"),
            ("@compute @workgroup_size(1) fn other() {}", "return score;"),
            ("override N: u32 = 1;", "return score;"),
            ("", "workgroupBarrier(); return score;"),
            ("", "storageBarrier(); return score;"),
            ("", "sh_p[0] = vec4(score); return score;"),
            ("", "lse[0] = 0u; return score;"),
            ("", "return sh_p[0].x;"),
            ("fn sneak() -> f32 { return sh_stage[0].x; }", "return sneak();"),
            ("", "return q_at(0u);"),
            ("", "return params.scale;"),
            ("", "return bitcast<f32>(extra(0u));"),
            ("fn extra(at: u32) -> u32 { return at; }", "return score;"),
            ("const TX = 3u;", "return score;"),
            ("", "return score_mod(score, b, h, q_idx, kv_idx);"),
            // What the kernel calls, predeclared or not, and what is there in some variants only.
            ("fn log(x: f32) -> f32 { return 7.0; }", "return score;"),
            ("fn exp2(x: vec4<f32>) -> vec4<f32> { return vec4(0.5); }", "return score;"),
            ("fn fma(a: vec4<f32>, b: vec4<f32>, c: vec4<f32>) -> vec4<f32> { return c; }", "return score;"),
            ("alias u32 = f32;", "return score;"),
            ("const bias = 0.5;", "return score;"),
            ("fn mask(x: f32) -> f32 { return x; }", "return score;"),
            ("const extras = 1.0;", "return score;"),
            ("fn out_half_bits(x: f32) -> f32 { return x; }", "return score;"),
            ("fn atomicLoad(a: u32) -> u32 { return a; }", "return score;"),
            ("fn /* log */ log(x: f32) -> f32 { return 7.0; }", "return score;"),
            ("fn\nlog(x: f32) -> f32 { return 7.0; }", "return score;"),
            ("enable f16;", "return score;"),
            ("enable dual_source_blending;", "return score;"),
            ("diagnostic(off, derivative_uniformity);", "return score;"),
            ("", "/* // */ workgroupBarrier(); return score;"),
            ("", "// x\r workgroupBarrier(); return score;\nreturn score;"),
            ("", "// x\u{2028} workgroupBarrier(); return score;\nreturn score;"),
        ] {
            assert!(matches!(with(module, body), Err(Error::Invalid(_))), "{module} {body}");
        }
        with("/* see workgroupBarrier */", "let crossesBarrier = score; return crossesBarrier; // enable log\n")
            .unwrap();
        let message = refused(with("\nfn log(x: f32) -> f32 { return 7.0; }", "return score;"));
        assert!(message.contains("score_mod, line 2") && message.contains("name log"), "{message}");
    }

    /// Each sound by itself, together not.
    #[test]
    fn two_mods_of_one_name() {
        let helper = "fn helper() -> f32 { return 1.0; }";
        let score_mod = score("return score * helper();").map_err(|_| ());
        assert!(score_mod.is_err(), "helper isn't the kernel's");
        let score_mod = ScoreMod::new(&format!(
            "{helper}\nfn score_mod(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32 {{ return score * helper(); }}"
        ))
        .unwrap();
        let mask = |text: &str| {
            MaskMod::new(&format!(
                "{text}\nfn mask_mod(b: u32, h: u32, q_idx: u32, kv_idx: u32) -> bool {{ return h == 0u; }}"
            ))
            .unwrap()
        };
        let both = |mask_mod| check_together(&Attention::full().score_mod(score_mod.clone()).mask_mod(mask_mod));
        both(mask("")).unwrap();
        both(mask("fn my_other() -> f32 { return 1.0; }")).unwrap();
        let message = refused(both(mask(helper)));
        assert!(message.contains("helper"), "{message}");
        // Neither defines it twice, but score_mod's step would become mask_mod's.
        let uses_step = score("return step(score, 0.5);").unwrap();
        let own_step = mask("fn step(a: f32, b: f32) -> f32 { return 7.0; }");
        let message = refused(check_together(&Attention::full().score_mod(uses_step).mask_mod(own_step)));
        assert!(message.contains("step"), "{message}");
    }
}
