use super::{Expanded, Library, Recipe, Value, includes, module_consts, spec_defaults};
use crate::{Error, Result};

/// Expands a kernel file `k.wgsl` of the given text, with some files to include.
fn expand(text: &'static str, change: impl FnOnce(Recipe) -> Recipe) -> Result<Expanded> {
    let files: &'static [_] = vec![
        ("k.wgsl", text),
        ("common/plain.wgsl", "fn plain() {}"),
        ("common/load_f32.wgsl", "fn load() -> f32 {}\n"),
        ("common/load_f16.wgsl", "fn load() -> f16 {}\n"),
        ("common/outer.wgsl", "// outer\n// @include plain\n// end of outer\n"),
        ("common/ring_a.wgsl", "// @include ring_b\n"),
        ("common/ring_b.wgsl", "\n// @include ring_a\n"),
        ("common/itself.wgsl", "// @include itself\n"),
        ("common/wrong.wgsl", "\n\n// @unrol\n"),
        ("common/specs.wgsl", "const DEPTH: u32 = 8u; // @spec\n"),
        (
            "common/tensor_f32.wgsl",
            "@binding(TENSOR_BINDING) var<storage, read> tensor: array<f32>; // tensor\nfn tensor_at() { tensors(tensor, my_tensor); }\n",
        ),
        ("common/tensor_half.wgsl", "enable f16;\nvar<storage, read> tensor: array<f16>;\n"),
        ("common/tensor_none.wgsl", "fn tensor_at() {}"),
    ]
    .leak();
    change(Recipe::new("k")).expand(Library(files))
}

fn text(text: &'static str) -> String {
    with(text, |recipe| recipe)
}

fn with(text: &'static str, change: impl FnOnce(Recipe) -> Recipe) -> String {
    expand(text, change).unwrap().text
}

/// The message of the error that the text, or the change of the recipe, leads to.
fn error(text: &'static str, change: impl FnOnce(Recipe) -> Recipe) -> String {
    match expand(text, change) {
        Err(Error::Invalid(message)) => message,
        other => panic!("expected an error for {text:?}, got {other:?}"),
    }
}

#[track_caller]
fn assert_error(text: &'static str, expected: &str) {
    let message = error(text, |recipe| recipe);
    assert!(message.contains(expected), "{message}\ndoesn't contain\n{expected}");
}

/// The expansion without line ends and indentation.
fn flat(source: &'static str) -> String {
    text(source).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A linear congruential generator (Knuth's constants).
struct Random(u64);

impl Random {
    fn text(&mut self, pieces: &[&str], count: usize) -> &'static str {
        let mut text = String::new();
        for _ in 0..count {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            text.push_str(pieces[usize::from((self.0 >> 48) as u16) % pieces.len()]);
        }
        text.leak()
    }
}

// Text without directives.

#[test]
fn text_without_directives_is_unchanged() {
    for sample in [
        "",
        "\n",
        "fn f() {}",
        "fn f() {\r\n\tlet a = 1; \r\n}\r\n",
        "// a comment, email@example.org\n/* block // @spec\n// @unroll\n*/ fn f() {}\n\n\n",
        "@compute @workgroup_size(64)\nfn f() {} // not first: @spec",
        "}}}} { /* /* nested */ é // @include x */ ünï = 'ö'; // ß",
        "for (var i = 0u; i < 4u; i++) { a[i] = i; }\nconst A: u32 = 3u;",
    ] {
        assert_eq!(text(sample), sample);
    }
}

/// The same for random mixes of what the scanner looks at.
#[test]
fn random_text_without_directives_is_unchanged() {
    const PIECES: [&str; 20] = [
        "/*",
        "*/",
        "//",
        "/",
        "*",
        "\n",
        "\r\n",
        " ",
        "{",
        "}",
        "(",
        ";",
        "const A: u32 = 1;",
        "for",
        "i",
        "é",
        "\u{2028}",
        "=",
        ".",
        "0u",
    ];
    let mut random = Random(1);
    let mut seen = 0;
    for _ in 0..3000 {
        let sample = random.text(&PIECES, 20);
        match expand(sample, |recipe| recipe) {
            Ok(expanded) => {
                seen += 1;
                assert_eq!(expanded.text, sample);
            }
            Err(Error::Invalid(message)) => assert!(message.contains("never closed"), "{message}"),
            Err(other) => panic!("{other}"),
        }
    }
    assert!(seen > 1000, "{seen}");
}

/// Broken text gives an error or some text, never a panic.
#[test]
fn random_text_with_directives_never_panics() {
    const PIECES: [&str; 22] = [
        "// @unroll\n",
        "// @include plain\n",
        "const A: u32 = ",
        "B",
        "// @spec\n",
        "for (var i = 0u; i < 3u; i++) {",
        "}\n",
        "{",
        "i",
        " i.i ",
        "é",
        "/*",
        "*/",
        "\n",
        ";",
        "=",
        "alias T = f32;",
        "(",
        ")",
        "min(",
        "// @",
        "9999999999999999999u",
    ];
    let mut random = Random(7);
    for _ in 0..5000 {
        let sample = random.text(&PIECES, 12);
        let _ = expand(sample, |recipe| recipe.spec("A", 1_u32));
        let _ = expand(sample, |recipe| recipe);
        let (_, _, _) = (spec_defaults(sample), includes(sample), module_consts(sample));
    }
}

// Directives in general.

#[test]
fn malformed_directives_are_errors() {
    assert_error("\n// @unrol\n", "k.wgsl:2: `// @unrol`: unknown directive");
    assert_error("// @includ x\n", "k.wgsl:1: `// @includ x`: unknown directive");
    assert_error("//@\n", "unknown directive");
    assert_error("// @include\n", "k.wgsl:1: `// @include`: expected");
    assert_error("// @include a b\n", "expected `// @include NAME`");
    assert_error("// @include load =\n", "expected `// @include NAME`");
    assert_error("// @include ../secret\n", "expected `// @include NAME`");
    assert_error("let a = 1; // @include plain\n", "has to stand on a line of its own");
    assert_error("for (;;) { // @unroll\n", "has to stand on a line of its own");
    assert_error("// @unroll 4\n", "nothing can follow");
    assert_error("\n\n// @spec\n", "k.wgsl:3: `// @spec`: the line declares nothing");
    assert_error("\n// @include wrong\n", "common/wrong.wgsl:3: `// @unrol`: unknown directive");
    assert_error("\n/* a /* b */\n\n", "k.wgsl:3: a block comment is never closed");
}

#[test]
fn directives_inside_block_comments_are_comments() {
    assert_eq!(text("/*\n// @nonsense\n*/\n"), "/*\n// @nonsense\n*/\n");
}

#[test]
fn directives_may_end_in_a_carriage_return() {
    assert_eq!(text("// @include load = f16\r\nx\r\n"), "fn load() -> f16 {}\nx\r\n");
}

// @include.

#[test]
fn includes_nest_and_end_their_lines() {
    assert_eq!(text("a\n  // @include outer\nb\n"), "a\n// outer\nfn plain() {}\n// end of outer\nb\n");
    assert_eq!(text("// @include plain"), "fn plain() {}\n");
}

#[test]
fn slots_take_the_recipe_then_the_default() {
    assert_eq!(text("// @include load = f32\n"), "fn load() -> f32 {}\n");
    assert_eq!(with("// @include load = f32\n", |it| it.slot("load", "f16")), "fn load() -> f16 {}\n");
    assert_eq!(with("// @include load\n", |it| it.slot("load", "f16")), "fn load() -> f16 {}\n");
}

#[test]
fn include_errors() {
    assert_error(
        "\n// @include load\n",
        "k.wgsl:2: slot `load` has no default, so the recipe has to choose from: f32, f16",
    );
    assert_error("// @include load = f64\n", "k.wgsl:1: slot `load` = `f64`, supported: f32, f16");
    assert_error("// @include nothing\n", "k.wgsl:1: there is no common/nothing.wgsl");
    assert_error(
        "// @include ring_a\n",
        "common/ring_b.wgsl:2: include cycle: k.wgsl -> common/ring_a.wgsl -> common/ring_b.wgsl -> common/ring_a.wgsl",
    );
    assert_error("// @include itself\n", "common/itself.wgsl:1: include cycle");
    assert_error(
        "// @include plain\n// @include plain\n",
        "k.wgsl:2: `plain` is included twice, the first time at k.wgsl:1",
    );
    assert_error(
        "// @include plain\n// @include outer\n",
        "common/outer.wgsl:2: `plain` is included twice, the first time at k.wgsl:1",
    );
    assert_error("// @include load = f32\n// @include load = f16\n", "k.wgsl:2: `load` is included twice");
    assert_error("// @include load = f32\n// @include load_f32\n", "k.wgsl:2: `load_f32` is included twice");
    let unused = error("// @include plain\n", |it| it.slot("load", "f32"));
    assert_eq!(unused, "k.wgsl: slot `load` isn't among the includes: plain");
    let unknown = error("// @include load = f32\n", |it| it.slot("load", "f64"));
    assert_eq!(unknown, "k.wgsl:1: slot `load` = `f64`, supported: f32, f16");
    let twice = error("// @include load\n", |it| it.slot("load", "f32").slot("load", "f32"));
    assert_eq!(twice, "k.wgsl: the recipe sets `load` twice");
}

/// A text that is included once a tensor goes by the tensor's name, in words that are the text's name or begin with it.
#[test]
fn instances_have_names_of_their_own() {
    assert_eq!(
        text("// @include tensor as q = f32\n// @include tensor as bias = none\n"),
        "@binding(Q_BINDING) var<storage, read> q: array<f32>; // tensor\nfn q_at() { tensors(q, my_tensor); }\nfn bias_at() {}\n"
    );
    let chosen = with("// @include tensor as q = none\n", |it| it.slot("q", "f32").read_write());
    assert!(chosen.starts_with("@binding(Q_BINDING) var<storage, read_write> q: array<f32>;"), "{chosen}");
    assert_error(
        "// @include tensor as q = f32\n// @include tensor as q = none\n",
        "k.wgsl:2: `q` is included twice, the first time at k.wgsl:1",
    );
    assert_error(
        "// @include tensor as q\n",
        "k.wgsl:1: slot `q` has no default, so the recipe has to choose from: f32",
    );
    assert_error("// @include tensor as = f32\n", "k.wgsl:1: `// @include tensor as = f32`: expected");
    let unknown = error("// @include tensor as q = f32\n", |it| it.slot("tensor", "f32"));
    assert_eq!(unknown, "k.wgsl: slot `tensor` isn't among the includes: q");
}

/// `enable` is taken from wherever it stands to the top, once.
#[test]
fn enables_come_first() {
    let expanded =
        expand("const A: u32 = 1u;\n// @include tensor as q = half\n// @include tensor as k = half\n", |it| it);
    let expanded = expanded.unwrap();
    assert_eq!(
        expanded.text,
        "enable f16;\nconst A: u32 = 1u;\nvar<storage, read> q: array<f16>;\nvar<storage, read> k: array<f16>;\n"
    );
    assert_eq!(expanded.origin(1).unwrap().to_string(), "common/tensor_half.wgsl:1");
    assert_eq!(expanded.origin(2).unwrap().to_string(), "k.wgsl:1");
}

/// A user's text stands as it is, whatever looks like a directive in it, and its lines know that they are the user's.
#[test]
fn a_slot_takes_a_users_text() {
    let user = std::sync::Arc::from("fn mine() {} // @unrol\n// @include plain\n@x; // @spec");
    let expanded = expand("// first\n// @include tensor as q = none\n// last\n", |it| it.text("q", &user)).unwrap();
    assert_eq!(expanded.text, "// first\nfn mine() {} // @unrol\n// @include plain\n@x; // @spec\n// last\n");
    assert_eq!(expanded.origin(4).unwrap().to_string(), "q:3");
    assert_eq!(expanded.origin(5).unwrap().to_string(), "k.wgsl:3");
    let empty = std::sync::Arc::from("");
    assert_eq!(with("// @include load = f32\nx\n", |it| it.text("load", &empty)), "x\n");
}

// @spec.

#[test]
fn specs_replace_the_value_and_nothing_else() {
    let source = "const A: u32 = 16u; // @spec rows\n  const  B : i32=-4 ; //@spec\nconst C: f32 = 1.0; // @spec\n\
                  const D: bool = true; // @spec\nalias Elem = vec4<f32>; // @spec\n\
                  const E: u32 = A + /* é */ 1u; // @spec\n";
    assert_eq!(text(source), source);
    let changed = with(source, |it| {
        let it = it.spec("A", 64_u32).spec("B", -2).spec("C", 1e-5_f32).spec("D", false);
        it.spec("Elem", "f16").spec("E", 3_u32)
    });
    let expected = "const A: u32 = 64u; // @spec rows\n  const  B : i32=(-2i) ; //@spec\n\
                    const C: f32 = 1e-5f; // @spec\n\
                    const D: bool = false; // @spec\nalias Elem = f16; // @spec\nconst E: u32 = 3u; // @spec\n";
    assert_eq!(changed, expected);
}

#[test]
fn literals() {
    let cases: [(Value, Option<&str>); 12] = [
        (0_u32.into(), Some("0u")),
        (u32::MAX.into(), Some("4294967295u")),
        (7_i32.into(), Some("7i")),
        (i32::MIN.into(), Some("(-2147483647i - 1i)")),
        (1_f32.into(), Some("1.0f")),
        ((-0.0_f32).into(), Some("-0.0f")),
        (f32::MAX.into(), Some("3.4028235e38f")),
        (f32::NAN.into(), None),
        (f32::INFINITY.into(), None),
        (true.into(), Some("true")),
        (false.into(), Some("false")),
        ("f16".into(), Some("f16")),
    ];
    for (value, expected) in cases {
        assert_eq!(value.literal().as_deref(), expected, "{value:?}");
    }
}

#[test]
fn specs_of_includes_count() {
    assert_eq!(with("// @include specs\n", |it| it.spec("DEPTH", 4_u32)), "const DEPTH: u32 = 4u; // @spec\n");
}

#[test]
fn spec_errors() {
    for declares_nothing in [
        "let a = 3u; // @spec\n",
        "const A = 3u; // @spec\n",
        "const A: u32 = ; // @spec\n",
        "const A: u32 // @spec\n",
        "const A: u32 = 1u; const B: u32 = 2u; // @spec\n",
        "alias A: u32 = u32; // @spec\n",
        "override A: u32 = 1u; // @spec\n",
        "fn f() {\n const A: u32 = 1u; // @spec\n}\n",
    ] {
        assert_error(declares_nothing, "`// @spec` has to follow");
    }
    let source =
        "const A: u32 = 1u; // @spec\nconst F: f32 = 1.0; // @spec\nalias T = f32; // @spec\nconst B: u32 = 1u;\n";
    let set = |name, value: Value| error(source, |it| it.spec(name, value));
    assert_eq!(set("X", 1_u32.into()), "k.wgsl: `X` isn't among the specs: A, F, T");
    assert_eq!(set("B", 1_u32.into()), "k.wgsl: `B` isn't among the specs: A, F, T");
    assert_eq!(set("A", 1_i32.into()), "k.wgsl:1: `A` = 1 is of kind i32, accepted: u32");
    assert_eq!(set("A", "u32".into()), "k.wgsl:1: `A` = u32 is of kind type, accepted: u32");
    assert_eq!(set("T", 2_u32.into()), "k.wgsl:3: `T` = 2 is of kind u32, accepted: type");
    assert_eq!(set("F", f32::NAN.into()), "k.wgsl:2: `F` = NaN, which no literal can express");
    assert_eq!(error(source, |it| it.spec("A", 1_u32).spec("A", 1_u32)), "k.wgsl: the recipe sets `A` twice");
    assert_error(
        "const A: u32 = 1u; // @spec\nconst A: u32 = 1u; // @spec\n",
        "k.wgsl:2: `A` is a spec twice, the first time at k.wgsl:1",
    );
    assert_error("alias A = f32; // @spec\nconst A: u32 = 1u; // @spec\n", "k.wgsl:2: `A` is a spec twice");
}

// @unroll.

#[test]
fn a_loop_becomes_blocks() {
    let source = "fn f() {\n    // @unroll\n    for (var i = 0u; i < 2u; i++) { // each\n\
                  \x20       a[i] = i;\n    }\n    g();\n}\n";
    let expected =
        "fn f() {\n    { // each\n        a[0u] = 0u;\n    }\n    { // each\n        a[1u] = 1u;\n    }\n    g();\n}\n";
    assert_eq!(text(source), expected);
}

#[test]
fn loops_on_one_line() {
    assert_eq!(
        text("// @unroll\n  for (var i = 1; i <= 2; i++) { g(i); } h();\n"),
        "  { g(1i); }\n  { g(2i); } h();\n"
    );
}

#[test]
fn forms_of_the_header() {
    let blocks = [
        ("for (var i = 0u; i < 4u; i++)", "0u 1u 2u 3u"),
        ("for (var i: u32 = 0; i < 2; i++)", "0u 1u"),
        ("for (var i: i32 = 0; i < 2; i++)", "0i 1i"),
        ("for (var i = 0; i < 2; i++)", "0i 1i"),
        ("for (var i = 0i; i <= 2; i += 2)", "0i 2i"),
        ("for (var i = -1; i < 1; i++)", "(-1i) 0i"),
        ("for(var i=0u;i<6u;i=i+2u)", "0u 2u 4u"),
        ("for (var i = 0u; i < 5u; i += 1u + 1u)", "0u 2u 4u"),
        ("for (var i = N; i <= 2u * N - 1u; i += N / 3u)", "3u 4u 5u"),
        ("for (var i = 4294967294u; i <= 4294967295u; i++)", "4294967294u 4294967295u"),
        ("for (var i = /* from */ 0u; i < 1u; i++)", "0u"),
    ];
    for (header, expected) in blocks {
        let source = format!("const N: u32 = 3u;\n// @unroll\n{header} {{ i }}\n").leak();
        let counters = flat(source).replace("const N: u32 = 3u; ", "").replace("{ ", "").replace(" }", "");
        assert_eq!(counters, expected, "{header}");
    }
}

#[test]
fn a_loop_that_never_runs_leaves_nothing() {
    assert_eq!(text("a\n// @unroll\nfor (var i = 0u; i < 0u; i++) {\n  x(i);\n}\nb\n"), "a\nb\n");
    assert_eq!(text("// @unroll\nfor (var i = 5; i < 2; i++) { x(i); } b();\n"), " b();\n");
}

#[test]
fn only_the_counter_itself_is_replaced() {
    let body = "i ii i_ _i i1 1i v.i v . i a[i] (i) i.x f(i,i) -i é_i /* i */ i // i";
    let expected = "3u ii i_ _i i1 1i v.i v . i a[3u] (3u) 3u.x f(3u,3u) -3u é_i /* i */ 3u // i";
    let source = format!("// @unroll\nfor (var i = 3u; i < 4u; i++) {{\n{body}\nv.\ni\n}}\n").leak();
    assert_eq!(text(source), format!("{{\n{expected}\nv.\ni\n}}\n"));
}

#[test]
fn braces_in_comments_are_no_braces() {
    let source = "// @unroll\nfor (var i = 0u; i < 1u; i++) { // {\n  /* } */ x(i); // }\n  if a { y(i); }\n}\nz();\n";
    assert_eq!(text(source), "{ // {\n  /* } */ x(0u); // }\n  if a { y(0u); }\n}\nz();\n");
}

#[test]
fn loops_nest() {
    let source = "// @unroll\nfor (var i = 0u; i < 3u; i++) {\n// @unroll\n\
                  for (var j = i; j < 2u * i; j += i + 1u) {\na[i][j];\n}\n}\n";
    assert_eq!(flat(source), "{ } { { a[1u][1u]; } } { { a[2u][2u]; } }");
    let source = "// @unroll\nfor (var i = 0u; i < 2u; i++) {\n// @unroll\nfor (var j = 0; j < 2; j++) { x(i, j); }}\n";
    assert_eq!(flat(source), "{ { x(0u, 0i); } { x(0u, 1i); }} { { x(1u, 0i); } { x(1u, 1i); }}");
    let plain_inside = "// @unroll\nfor (var i = 0u; i < 1u; i++) {\nfor (var j = 0u; j < i; j++) { x(i, j); }\n}\n";
    assert_eq!(flat(plain_inside), "{ for (var j = 0u; j < 0u; j++) { x(0u, j); } }");
}

#[test]
fn bounds_see_specs_and_includes() {
    let source =
        "const ROWS: u32 = DEPTH / 4u;\n// @unroll\nfor (var i = 0u; i < ROWS; i++) { i }\n// @include specs\n";
    assert!(with(source, |it| it.spec("DEPTH", 12_u32)).contains("{ 0u }\n{ 1u }\n{ 2u }\nconst DEPTH: u32 = 12u;"));
}

#[test]
fn unroll_header_errors() {
    let cases = [
        ("\n", "needs the next line to be"),
        ("while (true) {}", "needs the next line to be"),
        ("for (var i = 0u;\n i < 4u; i++) {}", "needs the next line to be"),
        ("for (var i = 0u; i < 4u; i++)\n{}", "needs the next line to be"),
        ("x(); for (var i = 0u; i < 4u; i++) {}", "needs the next line to be"),
        ("for (i = 0u; i < 4u; i++) {}", "needs the next line to be"),
        ("for (var i; i < 4u; i++) {}", "needs the next line to be"),
        ("for (var i = 0u; i < 4u) {}", "needs the next line to be"),
        ("for (var i: f32 = 0; i < 4; i++) {}", "type `f32`, accepted: u32, i32"),
        ("for (var i = 4u; i > 0u; i--) {}", "`i > 0u`, accepted: `i < BOUND`, `i <= BOUND`"),
        ("for (var i = 0u; j < 4u; i++) {}", "`j < 4u`, accepted:"),
        ("for (var i = 0u; i < 4u; j++) {}", "`j++`, accepted:"),
        ("for (var i = 0u; i < 4u; i *= 2u) {}", "`i *= 2u`, accepted:"),
        ("for (var i = 0u; i < 4u; i += 0u) {}", "step = 0, accepted: at least 1"),
        ("for (var i = 0; i < 4; i += -1) {}", "step = -1, accepted: at least 1"),
        ("for (var i = 0u; i < params.len; i++) {}", "in `params.len`: `params` is no module-scope integer constant"),
        ("for (var i = 0u; i < 4i; i++) {}", "u32 and i32 are mixed"),
        ("for (var i = 0u; i < -4; i++) {}", "-4 doesn't fit in u32"),
        ("for (var i = 0u; i < F; i++) {}", "`F` can't be evaluated: type `f32`, accepted: u32, i32"),
        ("for (var i = 0u; i < 4u; i++) {\n{}", "the loop's `{` is never closed"),
    ];
    for (source, expected) in cases {
        let source = format!("const F: f32 = 4.0;\n// @unroll\n{source}").leak();
        let message = error(source, |it| it);
        assert!(message.starts_with("k.wgsl:3: ") && message.contains(expected), "{source}\n{message}");
    }
    assert_error("a\n// @unroll", "k.wgsl:2: `// @unroll` has to stand before a `for`");
}

#[test]
fn unroll_body_errors() {
    let refused = [
        ("break;", "`break` leaves"),
        ("continue;", "`continue` cuts short"),
        ("if i == 2u { break; }", "`break` leaves"),
        ("if x { { continue; } }", "`continue` cuts short"),
        ("switch x { default: { continue; } }", "`continue` cuts short"),
        ("for (;;) { } break;", "`break` leaves"),
        ("i = 3u;", "`i` is assigned to in"),
        ("i\n= 3u;", "`i` is assigned to in"),
        ("i++;", "`i` is assigned to in"),
        ("i--;", "`i` is assigned to in"),
        ("i += 1u;", "`i` is assigned to in"),
        ("i <<= 1u;", "`i` is assigned to in"),
        ("let i = 3u;", "`let i` hides the counter of"),
        ("for (var i = 0u; i < 3u; i++) {}", "`var i` hides the counter of"),
    ];
    for (body, expected) in refused {
        let source = format!("// @unroll\nfor (var i = 0u; i < 4u; i++) {{\n/* é */ x();\n{body}\n}}\n").leak();
        let message = error(source, |it| it);
        assert_eq!(message, format!("k.wgsl:4: {expected} an unrolled loop"), "{body}");
    }
    let accepted = [
        "for (;;) { break; continue; }",
        "loop { if a { break; } continuing { break if i == 1u; } }",
        "while a { if i > 2u { continue; } }",
        "switch x { case 1: { break; } default: {} }",
        "loop { switch x { default: { continue; } } }",
        "// break;",
        "breaks(); return;",
        "if i == 3u || i <= 1u || i >= 2u || i != 1u {}",
        "x = i; a[i] = i; a[i] += 1u; s.i = 4u; s.i++; ii = i; // i = 3u",
    ];
    for body in accepted {
        text(format!("// @unroll\nfor (var i = 0u; i < 4u; i++) {{\n{body}\n}}\n").leak());
    }
}

#[test]
fn growth_is_bounded() {
    let expected = "k.wgsl:1: unrolling copies more than 4194304 bytes";
    assert_error("// @unroll\nfor (var i = 0u; i < 4000000000u; i++) {}\n", expected);
    let nested = "// @unroll\nfor (var i = 0u; i < 5000u; i++) {\n// @unroll\n\
                  for (var j = 0u; j < 5000u; j++) { x(i, j); }\n}\n";
    assert_error(nested, "unrolling copies more than 4194304 bytes");
    let mut deep = String::new();
    for depth in 0..800 {
        deep.push_str(&format!("// @unroll\nfor (var i{depth} = 0; i{depth} < 1; i{depth}++) {{\n"));
    }
    deep.push_str(&"}\n".repeat(800));
    assert_error(deep.leak(), "unrolling copies more than 4194304 bytes");
}

// Constant expressions.

#[test]
fn constants_are_evaluated() {
    let source = "const A: u32 = B * 2u; // later\nconst B: u32 = (1u + 2u) * 3u - 0x10u / 5u % 2u;\n\
                  const C: i32 = -7 / 2 + -(-3);\n\
                  const D = 1 << 4;\nconst E: u32 = max(A, 3u) >> 1;\nconst G: u32 = min(1 + 1, D);\n\
                  const F: f32 = 4;\nconst H: u32 = select(1u, 2u, true);\n\
                  const I: i32 = -2147483648;\nconst J: u32 = 2 - 3 - 4 + 9;\nalias K = u32;\nconst L: u32 = M;\n\
                  const M: u32 = L;\n\
                  const N: u32 = 1u - 2u + 3u;\nconst O: u32 = 1u << 32u;\nconst P: u32 = 1u / 0u;\n\
                  const Q: i32 = 2147483648;\nfn f() { \nconst R: u32 = 1u;\n}\n";
    let expected = [("A", 16), ("B", 8), ("C", 0), ("D", 16), ("E", 8), ("G", 2), ("I", -2_147_483_648), ("J", 4)];
    let found = module_consts(source);
    assert_eq!(found.iter().map(|(name, value)| (name.as_str(), *value)).collect::<Vec<_>>(), expected);
}

#[test]
fn expression_errors() {
    let cases = [
        ("", "a value expected before ``"),
        ("1u +", "a value expected before ``"),
        ("(1u", "`)` expected before ``"),
        ("1u)", "`)` isn't understood"),
        ("1.5", "`.5` isn't understood"),
        ("1u == 1u", "`== 1u` isn't understood"),
        ("min(1u)", "`,` expected before `)`"),
        ("0xZZ", "`0xZZ` is no integer"),
        ("12abc", "`12abc` is no integer"),
        ("4294967296u", "4294967296 doesn't fit in u32"),
        ("99999999999999999999", "`99999999999999999999` is no integer"),
        ("1u - 2u", "-1 doesn't fit in u32"),
        ("7u % 0u", "7 % 0 has no value"),
        ("1u << 32u", "1 << 32 has no value"),
        ("1i + 1u", "u32 and i32 are mixed"),
        ("9223372036854775807 + 1", "has no value"),
        ("LOOP", "`LOOP` can't be evaluated"),
        ("UNKNOWN", "`UNKNOWN` is no module-scope integer constant"),
    ];
    for (bound, expected) in cases {
        let source = format!("const LOOP: u32 = LOOP;\n// @unroll\nfor (var i = 0; i < {bound}; i++) {{}}\n").leak();
        let message = error(source, |it| it);
        assert!(message.starts_with("k.wgsl:3: in `") && message.contains(expected), "{bound}: {message}");
    }
    let deep = format!("// @unroll\nfor (var i = 0; i < {}; i++) {{}}\n", "(".repeat(100_000)).leak();
    assert_error(deep, "nested deeper than 64");
}

// Origins, inspection, recipes.

#[test]
fn lines_know_their_origin() {
    let source = "a\n// @include plain\n// @unroll\nfor (var i = 0u; i < 2u; i++) {\n  x(i);\n}\nb\n";
    let expanded = expand(source, |it| it).unwrap();
    let lines: Vec<String> = (1..)
        .zip(expanded.text.lines())
        .map(|(number, line)| format!("{line} <- {}", expanded.origin(number).unwrap()))
        .collect();
    let expected = [
        "a <- k.wgsl:1",
        "fn plain() {} <- common/plain.wgsl:1",
        "{ <- k.wgsl:4",
        "  x(0u); <- k.wgsl:5",
        "} <- k.wgsl:6",
        "{ <- k.wgsl:4",
        "  x(1u); <- k.wgsl:5",
        "} <- k.wgsl:6",
        "b <- k.wgsl:7",
    ];
    assert_eq!(lines, expected);
    assert_eq!(expanded.origin(0), None);
    assert_eq!(expanded.origin(10), None);
}

#[test]
fn inspection() {
    let source = "const A: u32 = 16u; // @spec rows\nalias T = vec2<f32>; // @spec\nconst B: u32 = A;\n\
                  // @include load = f32\n// @include plain\n";
    let defaults: Vec<_> = spec_defaults(source).unwrap().into_iter().collect();
    assert_eq!(defaults, [("A".to_owned(), "16u".to_owned()), ("T".to_owned(), "vec2<f32>".to_owned())]);
    assert_eq!(includes(source), ["load", "plain"]);
    assert!(spec_defaults("x // @spec\n").is_err());
}

#[test]
fn the_output_can_be_inspected_again() {
    let changed: &'static str =
        with("const A: u32 = 16u; // @spec\nconst B: u32 = 2u * A;\n", |it| it.spec("A", 4_u32)).leak();
    assert_eq!(spec_defaults(changed).unwrap()["A"], "4u");
    assert_eq!(module_consts(changed)["B"], 8);
}

#[test]
fn recipes() {
    let recipe = Recipe::new("flash_fwd").spec("BLOCK_Q", 64_u32).slot("load", "f32").spec("ALPHA", 0.5);
    assert_eq!(recipe.label(), "flash_fwd[ALPHA=0.5,BLOCK_Q=64,load=f32]");
    assert_eq!(recipe.stem(), "flash_fwd");
    assert_eq!(Recipe::new("k").label(), "k");
    let reordered = Recipe::new("flash_fwd").spec("ALPHA", 0.5).spec("BLOCK_Q", 64_u32).slot("load", "f32");
    assert_eq!(recipe, reordered);
    let missing = Recipe::new("missing").source().unwrap_err().to_string();
    assert!(missing.contains("there is no missing.wgsl among the kernel files"), "{missing}");
}

#[test]
fn every_embedded_kernel_expands_and_every_file_parses() {
    for path in Library::EMBEDDED.paths() {
        let (_, text) = Library::EMBEDDED.file(path).unwrap();
        spec_defaults(text).unwrap();
        if let (Some(stem), false) = (path.strip_suffix(".wgsl"), path.contains('/')) {
            let source = Recipe::new(stem).source().unwrap();
            assert!(!source.contains("// @unroll") && !source.contains("// @include"), "{path}");
        }
    }
}
