//! What the example says of itself, on a model small enough to be quick.

use tilewise::{Attention, Engine, Tensor};

use crate::model::{Config, Model};
use crate::{TEXT, Text};

/// None, loudly, where there is no adapter; a failure if one is required.
fn model(attention: Attention) -> Option<Model> {
    let engine = match Engine::new() {
        Ok(engine) => engine,
        Err(error) if std::env::var("REQUIRE_GPU").is_ok_and(|required| required == "1") => panic!("{error}"),
        Err(error) => {
            eprintln!("NOT RUN: {error}");
            return None;
        }
    };
    let config = Config { characters: 7, dim: 16, heads: 2, head_dim: 6, layers: 2, attention };
    Some(Model::new(&engine, config, 3).unwrap())
}

/// Two sequences of 20 characters, and what comes after each.
fn sequences() -> [Vec<u8>; 2] {
    let mut random = fastrand::Rng::with_seed(5);
    let text: Vec<u8> = (0..100).map(|_| random.u8(..7)).collect();
    Text::batch(&text, 2, 20, &mut random)
}

/// The loss with a parameter moved along a direction by so much.
fn loss_at(model: &mut Model, index: usize, direction: &[f32], by: f32) -> f64 {
    let [tokens, next] = sequences();
    let values = model.parameters[index].value.read().unwrap();
    let moved: Vec<f32> = values.iter().zip(direction).map(|(x, direction)| x + by * direction).collect();
    let shape = model.parameters[index].value.shape().to_vec();
    let moved = model.engine().upload(&moved, shape).unwrap();
    let value: Tensor = core::mem::replace(&mut model.parameters[index].value, moved);
    let attention = model.config.attention.clone();
    let loss = model.loss(&tokens, &next, 2, &attention).unwrap();
    model.parameters[index].value = value;
    f64::from(loss)
}

/// Along its own gradient the loss rises by as much as the gradient is long, for every parameter.
#[test]
fn gradients_are_those_of_the_loss() {
    for attention in [Attention::causal(), Attention::full().softmax_scale(1.0)] {
        let Some(mut model) = model(attention.clone()) else { return };
        let [tokens, next] = sequences();
        let (_, gradients) = model.gradients(&tokens, &next, 2, &attention).unwrap();
        assert_eq!(gradients.len(), model.parameters.len());
        for (index, gradient) in gradients.iter().enumerate() {
            let name = model.parameters[index].name.clone();
            assert_eq!(gradient.shape(), model.parameters[index].value.shape(), "{name}");
            let gradient = gradient.read().unwrap();
            let length = gradient.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            assert!(length > 1e-4, "{name}: {length}");
            let direction: Vec<f32> = gradient.iter().map(|x| (f64::from(*x) / length) as f32).collect();
            let step = 0.02;
            let [above, below] = [step, -step].map(|by| loss_at(&mut model, index, &direction, by));
            let slope = (above - below) / (2.0 * f64::from(step));
            assert!((slope - length).abs() < 0.01 * length + 1e-4, "{name}: {slope}, the gradient {length}");
        }
    }
}

/// Under the causal mask what comes later changes nothing; without it it does.
#[test]
fn the_mask_hides_what_comes() {
    let Some(model) = model(Attention::causal()) else { return };
    let [tokens, _] = sequences();
    let mut other = tokens.clone();
    other[19] = (other[19] + 1) % 7; // the last of the first sequence
    let logits = |tokens: &[u8], attention| model.forward(tokens, 2, &attention).unwrap().logits.read().unwrap();
    let before = 19 * 7;
    let [a, b] = [&tokens, &other].map(|tokens| logits(tokens, Attention::causal()));
    assert_eq!(a[..before], b[..before]);
    assert_ne!(a[before..before + 7], b[before..before + 7]);
    assert_eq!(a[before + 7..], b[before + 7..]);
    let [a, b] = [&tokens, &other].map(|tokens| logits(tokens, Attention::full()));
    assert!(a[..before].chunks(7).zip(b[..before].chunks(7)).all(|(a, b)| a != b));
    assert_eq!(a[before + 7..], b[before + 7..]);
}

/// It learns a sequence by heart; the entropy is between that of one key and that of all.
#[test]
fn it_learns() {
    let Some(mut model) = model(Attention::causal()) else { return };
    let [tokens, next] = sequences();
    let losses: Vec<f32> = (0..60).map(|_| model.train(&tokens, &next, 2, 0.01).unwrap()).collect();
    assert!(losses[0] > 1.5 && losses[59] < 0.5 * losses[0], "{losses:?}");
    let entropy = model.entropy(&tokens, 2).unwrap();
    let most = (1..=20).map(|keys| (keys as f32).ln()).sum::<f32>() / 20.0;
    assert!(entropy.len() == 2 && entropy.iter().all(|entropy| (0.01..most).contains(entropy)), "{entropy:?}, {most}");
}

/// Equal keys: weights alike, of which the entropy is known.
#[test]
fn entropy_of_weights_alike() {
    let Some(mut model) = model(Attention::causal()) else { return };
    for index in 0..model.parameters.len() {
        if model.parameters[index].name.ends_with("norm_1") {
            // All that attention reads is 0.
            let (elems, shape) =
                (model.parameters[index].value.elems(), model.parameters[index].value.shape().to_vec());
            let zeros = model.engine().upload(&vec![0.0f32; elems], shape).unwrap();
            model.parameters[index].value = zeros;
        }
    }
    let [tokens, _] = sequences();
    let expected = (1..=20).map(|keys| (keys as f32).ln()).sum::<f32>() / 20.0;
    for entropy in model.entropy(&tokens, 2).unwrap() {
        assert!((entropy - expected).abs() < 1e-4, "{entropy}, {expected}");
    }
}

#[test]
fn the_text_is_read_back() {
    let text = Text::new(TEXT).unwrap();
    let all = [text.training.clone(), text.held_out.clone()].concat();
    assert_eq!(text.decode(&all), TEXT);
    let [tokens, next] = Text::batch(&text.held_out, 3, 50, &mut fastrand::Rng::with_seed(1));
    assert_eq!((tokens.len(), &tokens[1..50]), (150, &next[..49]));
}
