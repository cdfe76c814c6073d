//! The golden cases (`tests/data/golden/README.md`): exact float64 results, rounded once to f32.

use std::collections::BTreeSet;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use tilewise::reference::{self, Align, Broadcast, Case, GradientTolerance, Gradients, Output, Precision};

/// The folder of test data.
fn data() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data"))
}

/// The tensors of one file.
struct File(Vec<u8>);

impl File {
    fn read(path: &Path) -> Self {
        Self(std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
    }

    /// A tensor's elements in the order of the file and its shape, if it is there.
    fn get<T>(&self, name: &str, dtype: Dtype, element: impl Fn(&[u8]) -> T) -> Option<(Vec<T>, Vec<usize>)> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor(name).ok()?;
        assert_eq!(tensor.dtype(), dtype, "{name}");
        let elements = tensor.data().chunks_exact(dtype.bitsize() / 8).map(element).collect();
        Some((elements, tensor.shape().to_vec()))
    }

    fn f32(&self, name: &str) -> Option<(Vec<f32>, Vec<usize>)> {
        self.get(name, Dtype::F32, |bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
    }

    fn f16(&self, name: &str) -> Vec<f32> {
        self.get(name, Dtype::F16, |bytes| half::f16::from_le_bytes(bytes.try_into().unwrap()).to_f32()).unwrap().0
    }

    fn bool(&self, name: &str) -> Option<(Vec<bool>, Vec<usize>)> {
        self.get(name, Dtype::BOOL, |bytes| bytes[0] != 0)
    }

    fn u32(&self, name: &str) -> Option<Vec<u32>> {
        Some(self.get(name, Dtype::I32, |bytes| u32::from_le_bytes(bytes.try_into().unwrap()))?.0)
    }
}

/// A golden case: its entry in the manifest and its tensors.
pub(crate) struct Golden {
    pub(crate) entry: Value,
    file: File,
}

impl Golden {
    pub(crate) fn all() -> Vec<Self> {
        let folder = data().join("golden");
        let manifest: Value = serde_json::from_slice(&File::read(&folder.join("manifest.json")).0).unwrap();
        let golden = |entry: &Value| Self {
            entry: entry.clone(),
            file: File::read(&folder.join(entry["file"].as_str().unwrap())),
        };
        manifest["cases"].as_array().unwrap().iter().map(golden).collect()
    }

    pub(crate) fn name(&self) -> &str {
        self.entry["name"].as_str().unwrap()
    }

    pub(crate) fn is_packed(&self) -> bool {
        self.entry["layout"] == "thd"
    }

    /// Hands the case to `f`, with the boundaries of a packed one.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&Case<'_>, Option<(&[u32], &[u32])>) -> R) -> R {
        let (dims, attrs) = (&self.entry["dims"], &self.entry["attrs"]);
        let size = |name| usize::try_from(dims[name].as_u64().unwrap()).unwrap();
        let window = |name| u32::try_from(attrs[name].as_i64().unwrap()).ok(); // -1: none
        let tensor = |name| self.file.f32(name).map(|(data, _)| data);
        let (q, k, v) = (tensor("q").unwrap(), tensor("k").unwrap(), tensor("v").unwrap());
        let (alibi_slopes, sinks, kv_lens) = (tensor("alibi_slopes"), tensor("sinks"), self.file.u32("kv_lens"));
        let (bias, mask) = (self.file.f32("bias"), self.file.bool("mask"));
        let boundaries = self.file.u32("cu_seqlens_q").zip(self.file.u32("cu_seqlens_k"));
        let case = Case {
            batch: size("b"),
            q_heads: size("hq"),
            kv_heads: size("hkv"),
            q_len: size("sq"),
            kv_len: size("skv"),
            head_dim: size("d"),
            value_dim: size("dv"),
            q: &q,
            k: &k,
            v: &v,
            softmax_scale: attrs["scale"].as_f64(),
            causal: attrs["causal"].as_bool().unwrap(),
            align: if attrs["align"] == "top_left" { Align::TopLeft } else { Align::BottomRight },
            window_left: window("window_left"),
            window_right: window("window_right"),
            softcap: attrs["softcap"].as_f64().filter(|&softcap| softcap > 0.0),
            alibi_slopes: alibi_slopes.as_deref(),
            bias: bias.as_ref().map(|(data, shape)| Broadcast { data, shape: shape[..].try_into().unwrap() }),
            mask: mask.as_ref().map(|(data, shape)| Broadcast { data, shape: shape[..].try_into().unwrap() }),
            sinks: sinks.as_deref(),
            kv_lens: kv_lens.as_deref(),
            ..Case::default()
        };
        f(&case, boundaries.as_ref().map(|(q, k)| (&q[..], &k[..])))
    }

    pub(crate) fn reference(&self) -> Output {
        self.with(|case, boundaries| match boundaries {
            Some((q, k)) => reference::attention_packed(case, q, k),
            None => reference::attention(case),
        })
        .unwrap()
    }

    /// The gradients, for the case's `do` and `dlse`.
    fn gradients(&self) -> Gradients {
        let (grad_o, grad_lse) = (self.expected("do"), self.file.f32("dlse").map(|(data, _)| data));
        self.with(|case, boundaries| match boundaries {
            Some((q, k)) => reference::attention_backward_packed(case, q, k, &grad_o, grad_lse.as_deref()),
            None => reference::attention_backward(case, &grad_o, grad_lse.as_deref()),
        })
        .unwrap()
    }

    fn stores(&self, output: &str) -> bool {
        self.entry["outputs"].get(output).is_some()
    }

    pub(crate) fn expected(&self, output: &str) -> Vec<f32> {
        self.file.f32(output).unwrap().0
    }
}

/// Fails unless rounding `got` to f32 gives `stored`, give or take `slack`.
fn assert_rounds_to(what: &str, got: &[f64], stored: &[f32], slack: f64) {
    assert_eq!(got.len(), stored.len(), "{what}");
    for (n, (&got, &stored)) in got.iter().zip(stored).enumerate() {
        let half_ulp = f64::from(stored.abs().next_up() - stored.abs()) / 2.0;
        let error = (got - f64::from(stored)).abs();
        assert!(got == f64::from(stored) || error <= half_ulp + slack, "{what}[{n}]: {got:e}, stored {stored:e}");
    }
}

#[test]
fn outputs_round_to_the_stored_values() {
    for golden in Golden::all() {
        let output = golden.reference();
        for (name, got) in [("o", &output.o), ("lse", &output.lse)] {
            let slack = 1e-14 * output.tolerance.mag.max(1.0) * (4.0 + output.tolerance.s());
            assert_rounds_to(&format!("{} {name}", golden.name()), got, &golden.expected(name), slack);
        }
    }
}

#[test]
fn gradients_round_to_the_stored_values() {
    let mut seen = BTreeSet::new();
    for golden in Golden::all().into_iter().filter(|golden| golden.stores("dq")) {
        let gradients = golden.gradients();
        let tolerance = gradients.tolerance;
        for (name, got, mag) in [
            ("dq", Some(gradients.dq), tolerance.dq_mag),
            ("dk", Some(gradients.dk), tolerance.dk_mag),
            ("dv", Some(gradients.dv), tolerance.dv_mag),
            ("dbias", gradients.dbias, tolerance.dbias_mag),
            ("dsinks", gradients.dsinks, tolerance.dsinks_mag),
        ] {
            assert_eq!(got.is_some(), golden.stores(name), "{} {name}", golden.name());
            let Some(got) = got else { continue };
            let slack = 1e-14 * mag * (4.0 + tolerance.forward.s());
            assert_rounds_to(&format!("{} {name}", golden.name()), &got, &golden.expected(name), slack);
            seen.insert(name);
        }
    }
    assert_eq!(seen.len(), 5, "{seen:?}");
}

/// Fails unless `got` is the manifest's number.
fn assert_manifest(golden: &Golden, what: &str, got: f64, expected: &Value) {
    let expected = expected.as_f64().unwrap();
    let close = (got - expected).abs() <= 1e-12 * expected;
    assert!(close, "{} {what}: {got:e}, manifest {expected:e}", golden.name());
}

const STORAGES: [(&str, Precision); 3] = [("f32", Precision::F32), ("f16", Precision::F16), ("bf16", Precision::Bf16)];

#[test]
fn tolerances_are_those_of_the_manifest() {
    for golden in Golden::all() {
        let (entry, tolerance) = (&golden.entry, golden.reference().tolerance);
        assert_manifest(&golden, "mag", tolerance.mag, &entry["mag"]["o"]);
        assert_manifest(&golden, "S", tolerance.s(), &entry["S"]);
        for (dtype, storage) in STORAGES {
            let Some(expected) = entry["tol"].get(dtype) else { continue };
            assert_manifest(&golden, dtype, tolerance.o(storage), &expected["o"]);
            assert_manifest(&golden, "lse", tolerance.lse(), &expected["lse"]);
        }
    }
}

#[test]
fn tolerances_of_gradients_are_those_of_the_manifest() {
    for golden in Golden::all().into_iter().filter(|golden| golden.stores("dq")) {
        let (entry, tolerance) = (&golden.entry, golden.gradients().tolerance);
        assert_manifest(&golden, "S", tolerance.forward.s(), &entry["S"]);
        for (name, mag, tol) in [
            ("dq", tolerance.dq_mag, GradientTolerance::dq as fn(&GradientTolerance, Precision) -> f64),
            ("dk", tolerance.dk_mag, GradientTolerance::dk),
            ("dv", tolerance.dv_mag, GradientTolerance::dv),
            ("dbias", tolerance.dbias_mag, GradientTolerance::dbias),
            ("dsinks", tolerance.dsinks_mag, GradientTolerance::dsinks),
        ] {
            if !golden.stores(name) {
                assert_eq!(mag, 0.0);
                continue;
            }
            assert_manifest(&golden, name, mag, &entry["mag"][name]);
            for (dtype, storage) in STORAGES {
                let Some(expected) = entry["tol"].get(dtype) else { continue };
                assert_manifest(&golden, dtype, tol(&tolerance, storage), &expected[name]);
            }
        }
    }
}

/// Real activations: one layer of a language model, `o` and `lse` computed in float64 elsewhere and stored as f32.
///
/// The file says (batch, heads, len, dim), but its elements are in the order (len, heads, dim): that of a packed batch of one.
#[test]
fn a_layer_of_smollm2() {
    let file = File::read(&data().join("qkv/smollm2_ecclesiastes_layer15.safetensors"));
    let (q, k, v) = (file.f16("q"), file.f16("k"), file.f16("v"));
    let shape = Case {
        batch: 1,
        q_heads: 9,
        kv_heads: 3,
        q_len: 1024,
        kv_len: 1024,
        head_dim: 64,
        value_dim: 64,
        ..Case::default()
    };
    let case = Case { q: &q, k: &k, v: &v, softmax_scale: Some(0.125), causal: true, ..shape };
    let output = reference::attention_packed(&case, &[0, 1024], &[0, 1024]).unwrap();
    assert_rounds_to("o", &output.o, &file.f32("o").unwrap().0, 1e-13);
    assert_rounds_to("lse", &output.lse, &file.f32("lse").unwrap().0, 1e-13);
}
