//! GGUF files made in memory: small valid models that tests then change.

/// A GGUF file in the making. Setting a key or a tensor again replaces it.
#[derive(Clone, Default)]
pub(in crate::loader) struct GgufFile {
    /// Key, type number, encoded value.
    entries: Vec<(String, u32, Vec<u8>)>,
    tensors: Vec<TestTensor>,
}

#[derive(Clone)]
struct TestTensor {
    name: String,
    /// Outermost first.
    shape: Vec<u64>,
    type_number: u32,
    bytes: Vec<u8>,
}

const ALIGNMENT: usize = 32;

fn text_bytes(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

impl GgufFile {
    fn entry(mut self, key: &str, type_number: u32, value: Vec<u8>) -> Self {
        self.entries.retain(|(existing, _, _)| existing != key);
        self.entries.push((key.to_owned(), type_number, value));
        self
    }

    pub(in crate::loader) fn text(self, key: &str, value: &str) -> Self {
        self.entry(key, 8, text_bytes(value))
    }

    pub(in crate::loader) fn u16(self, key: &str, value: u16) -> Self {
        self.entry(key, 2, value.to_le_bytes().to_vec())
    }

    pub(in crate::loader) fn u32(self, key: &str, value: u32) -> Self {
        self.entry(key, 4, value.to_le_bytes().to_vec())
    }

    pub(in crate::loader) fn f32(self, key: &str, value: f32) -> Self {
        self.entry(key, 6, value.to_le_bytes().to_vec())
    }

    fn array(self, key: &str, type_number: u32, elements: Vec<Vec<u8>>) -> Self {
        let mut value = type_number.to_le_bytes().to_vec();
        value.extend_from_slice(&(elements.len() as u64).to_le_bytes());
        value.extend(elements.into_iter().flatten());
        self.entry(key, 9, value)
    }

    fn texts(self, key: &str, values: &[&str]) -> Self {
        self.array(key, 8, values.iter().map(|text| text_bytes(text)).collect())
    }

    fn i32s(self, key: &str, values: &[i32]) -> Self {
        let elements = values.iter().map(|value| value.to_le_bytes().to_vec());
        self.array(key, 5, elements.collect())
    }

    pub(in crate::loader) fn without(mut self, key: &str) -> Self {
        self.entries.retain(|(existing, _, _)| existing != key);
        self
    }

    /// An F32 tensor; `shape` is outermost first.
    pub(in crate::loader) fn tensor(self, name: &str, shape: &[u64], values: &[f32]) -> Self {
        let bytes = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        self.raw_tensor(name, shape, 0, bytes)
    }

    /// A tensor of zeros of any type.
    pub(in crate::loader) fn tensor_of_type(
        self,
        name: &str,
        shape: &[u64],
        type_number: u32,
        num_bytes: usize,
    ) -> Self {
        self.raw_tensor(name, shape, type_number, vec![0; num_bytes])
    }

    fn raw_tensor(mut self, name: &str, shape: &[u64], type_number: u32, bytes: Vec<u8>) -> Self {
        self.tensors.retain(|tensor| tensor.name != name);
        self.tensors.push(TestTensor {
            name: name.to_owned(),
            shape: shape.to_vec(),
            type_number,
            bytes,
        });
        self
    }

    /// Metadata with the first `num_first` tensors, and the other tensors alone.
    pub(in crate::loader) fn split(mut self, num_first: usize) -> (Self, Self) {
        let rest = self.tensors.split_off(num_first);
        let second = GgufFile {
            entries: Vec::new(),
            tensors: rest,
        };
        (self, second)
    }

    /// The file, version 3.
    pub(in crate::loader) fn bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend_from_slice(&3_u32.to_le_bytes());
        file.extend_from_slice(&(self.tensors.len() as u64).to_le_bytes());
        file.extend_from_slice(&(self.entries.len() as u64).to_le_bytes());
        for (key, type_number, value) in &self.entries {
            file.extend_from_slice(&text_bytes(key));
            file.extend_from_slice(&type_number.to_le_bytes());
            file.extend_from_slice(value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            file.extend_from_slice(&text_bytes(&tensor.name));
            file.extend_from_slice(&(tensor.shape.len() as u32).to_le_bytes());
            for dim in tensor.shape.iter().rev() {
                file.extend_from_slice(&dim.to_le_bytes());
            }
            file.extend_from_slice(&tensor.type_number.to_le_bytes());
            file.extend_from_slice(&(data.len() as u64).to_le_bytes());
            data.extend_from_slice(&tensor.bytes);
            data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
        }
        file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
        file.extend_from_slice(&data);
        file
    }

    fn vocabulary(self, tokens: &[&str; 4]) -> Self {
        self.text("tokenizer.ggml.model", "gpt2")
            .texts("tokenizer.ggml.tokens", tokens)
            .i32s("tokenizer.ggml.token_type", &[3, 3, 3, 1])
            .u32("tokenizer.ggml.bos_token_id", 0)
            .u32("tokenizer.ggml.eos_token_id", 1)
    }

    /// A matrix whose rows hold their own number.
    fn numbered_rows(self, name: &str, rows: u64, columns: u64) -> Self {
        let values = (0..rows).flat_map(|row| (0..columns).map(move |_| row as f32));
        let values: Vec<f32> = values.collect();
        self.tensor(name, &[rows, columns], &values)
    }

    fn filled(self, name: &str, width: u64, value: f32) -> Self {
        self.tensor(name, &[width], &vec![value; width as usize])
    }

    /// Attention and MLP of one layer: hidden 32, two heads of 16, one for keys and values, MLP 64.
    fn layer(self, layer: u32) -> Self {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        self.filled(&name("attn_norm"), 32, 2.0)
            .numbered_rows(&name("attn_q"), 32, 32)
            .numbered_rows(&name("attn_k"), 16, 32)
            .numbered_rows(&name("attn_v"), 16, 32)
            .numbered_rows(&name("attn_output"), 32, 32)
            .filled(&name("ffn_norm"), 32, 2.0)
            .numbered_rows(&name("ffn_gate"), 64, 32)
            .numbered_rows(&name("ffn_up"), 64, 32)
            .numbered_rows(&name("ffn_down"), 32, 64)
    }

    fn sizes(self, architecture: &str, num_layers: u32) -> Self {
        let key = |name: &str| format!("{architecture}.{name}");
        self.text("general.architecture", architecture)
            .u32(&key("block_count"), num_layers)
            .u32(&key("context_length"), 128)
            .u32(&key("embedding_length"), 32)
            .u32(&key("feed_forward_length"), 64)
            .u32(&key("attention.head_count"), 2)
            .u32(&key("attention.head_count_kv"), 1)
            .f32(&key("attention.layer_norm_rms_epsilon"), 1e-5)
    }

    fn frame(self) -> Self {
        self.numbered_rows("token_embd.weight", 4, 32)
            .filled("output_norm.weight", 32, 2.0)
    }
}

/// One layer, tied embeddings.
pub(in crate::loader) fn tiny_llama() -> GgufFile {
    GgufFile::default()
        .sizes("llama", 1)
        .text("general.name", "tiny")
        .text("general.license", "mit")
        .vocabulary(&["<s>", "</s>", "<|im_end|>", "a"])
        .frame()
        .layer(0)
}

/// Seven layers, of which the sixth is global.
pub(in crate::loader) fn tiny_gemma3() -> GgufFile {
    let file = GgufFile::default()
        .sizes("gemma3", 7)
        .u32("gemma3.attention.sliding_window", 512)
        .f32("gemma3.rope.freq_base", 1e6)
        .vocabulary(&["<bos>", "<eos>", "<end_of_turn>", "a"])
        .frame();
    (0..7).fold(file, |file, layer| {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        file.layer(layer)
            .filled(&name("attn_q_norm"), 16, 2.0)
            .filled(&name("attn_k_norm"), 16, 2.0)
            .filled(&name("post_attention_norm"), 32, 2.0)
            .filled(&name("post_ffw_norm"), 32, 2.0)
    })
}
