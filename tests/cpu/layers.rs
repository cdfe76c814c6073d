//! The layers: a module uses only modules of lower ones, so that a reader can stop at any height.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The height of each module of the library.
const LAYERS: [(&str, u32); 9] = [
    ("error", 0),
    ("problem", 0),
    ("reference", 1),
    ("shader", 1),
    ("tuning", 1),
    ("gpu", 2),
    ("kernels", 3),
    ("plan", 4),
    ("engine", 5),
];

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn rust_files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|it| it == "rs") {
            found.push(path);
        }
    }
}

/// The code of a file: without comments, and without what only tests see.
fn code(text: &str) -> String {
    let before_tests = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = before_tests.lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// The first name of each path that follows `crate::`, also within `crate::{..}`; and, in a file right below `src`, `super::`.
fn crate_paths(code: &str, roots: &[&str]) -> Vec<String> {
    let mut names = Vec::new();
    let word = |text: &str| text.chars().take_while(|it| it.is_alphanumeric() || *it == '_').collect::<String>();
    for root in roots {
        for (at, _) in code.match_indices(root) {
            // `pub(crate)` has no `::`; `$crate::` and `super::super::` would be other roots.
            let rest = &code[at + root.len()..];
            let Some(group) = rest.strip_prefix('{') else {
                names.push(word(rest));
                continue;
            };
            let mut depth = 0;
            let mut start = true;
            for (index, char) in group.char_indices() {
                match char {
                    '{' => depth += 1,
                    '}' if depth == 0 => break,
                    '}' => depth -= 1,
                    ',' if depth == 0 => start = true,
                    _ if start && !char.is_whitespace() => {
                        names.push(word(&group[index..]));
                        start = false;
                    }
                    _ => {}
                }
            }
        }
    }
    names
}

/// Which module each name comes from that `lib.rs` re-exports.
fn exports() -> BTreeMap<String, String> {
    let lib = code(&fs::read_to_string(src().join("lib.rs")).unwrap());
    let mut exports = BTreeMap::new();
    for statement in lib.split("pub use ").skip(1) {
        let statement = statement.split(';').next().unwrap_or_default();
        if let Some((module, names)) = statement.split_once("::") {
            for name in names.trim_matches(['{', '}']).split(',') {
                exports.insert(name.trim().to_owned(), module.to_owned());
            }
        }
    }
    exports
}

#[test]
fn modules_use_only_lower_layers() {
    let layers = BTreeMap::from(LAYERS);
    let exports = exports();
    let mut files = Vec::new();
    rust_files(&src(), &mut files);
    let (mut seen, mut wrong) = (BTreeMap::new(), Vec::new());
    for file in files {
        let path = file.strip_prefix(src()).unwrap();
        let parts: Vec<_> = path.iter().map(|part| part.to_str().unwrap().trim_end_matches(".rs")).collect();
        // The root itself, and files that are tests.
        if parts == ["lib"] || parts.last().is_some_and(|it| *it == "tests" || *it == "contract") {
            continue;
        }
        let module = parts[0];
        let height = layers.get(module).unwrap_or_else(|| panic!("{} belongs to no layer", path.display()));
        let at_root = parts.len() == 1 || parts == [module, "mod"];
        let roots: &[&str] = if at_root { &["crate::", "super::"] } else { &["crate::", "super::super::"] };
        for name in crate_paths(&code(&fs::read_to_string(&file).unwrap()), roots) {
            let target = exports.get(&name).map_or(name.as_str(), String::as_str);
            let Some(target_height) = layers.get(target) else {
                // An inline module's `super::name`, which is the file itself.
                assert!(at_root && name.starts_with(char::is_lowercase), "{}: crate::{name}?", path.display());
                continue;
            };
            *seen.entry(module.to_owned()).or_insert(0) += 1;
            let only_errors = module != "reference" || target == "error" || target == "reference";
            if target != module && (target_height >= height || !only_errors) {
                wrong.push(format!("{}: {module} ({height}) uses {target} ({target_height})", path.display()));
            }
        }
    }
    // A module of L0 may use another of L0, as `problem` does its `error`.
    wrong.retain(|line| !line.ends_with("problem (0) uses error (0)"));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for module in ["problem", "reference", "shader", "tuning", "gpu", "kernels", "plan", "engine"] {
        assert!(seen.contains_key(module), "no use found in {module}: the test reads nothing");
    }
}

#[test]
fn paths_are_found_wherever_they_stand() {
    let found = crate_paths("use crate::{a::{b, c}, Error,\n plan::Plan}; let x = crate::gpu::Y;", &["crate::"]);
    assert_eq!(found, ["a", "Error", "plan", "gpu"]);
    assert_eq!(code("a // crate::engine\n#[cfg(test)]\nmod tests {\nuse crate::plan;"), "a ");
}
