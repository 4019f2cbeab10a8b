"""Small models of many kinds with random weights, saved as users save theirs, for the tests of this folder."""

import textwrap
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import BertProcessing
from torch import nn

TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}


def configurations() -> dict[str, tuple[str, Any]]:
    """By name: the architecture, and its configuration."""
    return {
        "bert": ("BertModel", transformers.BertConfig(**TEXT)),
        "bert-classifier": ("BertForSequenceClassification", transformers.BertConfig(**TEXT, num_labels=3)),
        "roberta": ("RobertaModel", transformers.RobertaConfig(**TEXT)),
        "llama": (
            "LlamaForCausalLM",
            transformers.LlamaConfig(**TEXT, num_key_value_heads=2, tie_word_embeddings=True),
        ),
        "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99)),
        "mixtral": (
            "MixtralForCausalLM",
            transformers.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=1),
        ),
        "resnet": (
            "ResNetForImageClassification",
            transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_labels=5),
        ),
        "vit": (
            "ViTModel",
            transformers.ViTConfig(**{**TEXT, "image_size": 32, "patch_size": 8}),
        ),
        "clip": (
            "CLIPModel",
            transformers.CLIPConfig(
                text_config={**TEXT, "projection_dim": 16, "max_position_embeddings": 40, "eos_token_id": 98},
                vision_config={**TEXT, "image_size": 32, "patch_size": 8, "projection_dim": 16},
                projection_dim=16,
            ),
        ),
        "t5": (
            "T5ForConditionalGeneration",
            transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=99),
        ),
        "whisper": (
            "WhisperForConditionalGeneration",
            transformers.WhisperConfig(
                d_model=32,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                vocab_size=99,
                num_mel_bins=20,
                max_source_positions=30,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
            ),
        ),
        "wav2vec2": (
            "Wav2Vec2ForCTC",
            transformers.Wav2Vec2Config(**{**TEXT, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3)}),
        ),
    }


def save_huggingface(name: str, directory: Path, *, seed: int = 0, **settings: Any) -> nn.Module:
    """Save a tiny model as ``save_pretrained`` does; the model itself, in eval mode."""
    architecture, config = configurations()[name]
    for key, value in settings.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config).eval()
    model.save_pretrained(directory)
    assert isinstance(model, nn.Module)
    return model


WORDS = ("a", "dormouse", "sleeps", "all", "winter", "and", "eats", "nuts", "in", "summer")


def save_tokenizer(directory: Path) -> Tokenizer:
    """A tokenizer of a few words beside a tiny model, with the special tokens of BERT."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    vocabulary = {word: number for number, word in enumerate((*special, *WORDS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


FACTORIES = textwrap.dedent(
    """
    import torch
    from torch import nn

    from layers import Scale


    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first, self.last = nn.Linear(8, width), nn.Linear(width, 3)
            self.scale = Scale()

        def forward(self, x, shift=None):
            y = self.last(self.scale(self.first(x)).relu())
            return y if shift is None else y + shift


    class Keeping(Net):
        # keeps a view of its weights from its first run
        def forward(self, x, shift=None):
            if not hasattr(self, "kept"):
                self.kept = self.first.weight[0]
            return super().forward(x, shift) + self.kept.sum()


    class Counting(Net):
        # counts its runs in an attribute that is no tensor
        calls = 0

        def forward(self, x, shift=None):
            self.calls += 1
            return super().forward(x, shift) + self.calls


    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(4), persistent=False)
            self.last = torch.zeros(4)

        def forward(self, x):
            self.count += 1
            self.mean = self.mean * 0.5 + x.mean(0) * 0.5
            self.last = x[-1].clone()
            return {"y": self.linear(x) + self.mean, "count": self.count.clone()}


    class Echo(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, text, x):
            return {"loud": [[item.upper() for item in row] for row in text], "y": self.linear(x)}


    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                yield {"x": x}


    class Failing(Net):
        def forward(self, x, shift=None):
            if x.sum() > 1000:
                raise ValueError("too much\\nto bear")
            return super().forward(x, shift)


    def net(width=16):
        torch.manual_seed(1)
        return Net(width), (torch.ones(1, 8),)


    def random_net():
        return Net(16), {"x": torch.ones(1, 8)}


    def tensors_of_net(scale=1.0, drop=None, more=None):
        net = Net(16)
        tensors = {name: value * scale for name, value in net.state_dict().items()}
        tensors |= {"scale.factors.0": torch.ones(1), "scale.factors.1": torch.ones(1)}
        return {name: value for name, value in tensors.items() if name != drop} | (more or {})


    def bytes_of_net():
        return {name: b"" for name in tensors_of_net()}


    def keeping():
        return Keeping(16), {"x": torch.ones(1, 8)}


    def counting():
        return Counting(16), {"x": torch.ones(1, 8)}


    def random_recurrent():
        return nn.LSTM(8, 8, num_layers=2, batch_first=True), (torch.ones(1, 5, 8),)


    def recurrent():
        torch.manual_seed(4)
        return nn.LSTM(8, 8, num_layers=2, batch_first=True), (torch.ones(1, 5, 8),)


    def counter():
        torch.manual_seed(2)
        return Counter(), (torch.ones(2, 4),)


    def echo():
        return Echo()


    def stream():
        torch.manual_seed(3)
        return Stream(), {"x": torch.ones(1, 4)}


    def failing():
        return Failing(16), (torch.ones(1, 8),)


    class Colours(nn.Module):
        # scores of a picture are its mean red, green and blue
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), 10.0))

        def forward(self, picture):
            return picture.mean((2, 3)) * self.weight


    def colours():
        return Colours(), (torch.ones(1, 3, 8, 8),)


    class Mixing(Net):
        def forward(self, x, shift=None):
            return super().forward(x - x.mean(0), shift)


    class Summing(Net):
        def forward(self, x, shift=None):
            return {"y": super().forward(x, shift), "total": x.sum()}


    class Single(Net):
        def forward(self, x, shift=None):
            return super().forward(x.reshape(1, 8), shift)


    def mixing():
        return Mixing(16), (torch.ones(1, 8),)


    def summing():
        torch.manual_seed(1)
        return Summing(16), (torch.ones(1, 8),)


    def single():
        return Single(16), (torch.ones(1, 8),)


    def loose():
        return nn.Linear(8, 2), (torch.ones(8),)


    def scripted():
        return torch.jit.script(nn.Linear(2, 2)), (torch.ones(1, 2),)


    def hidden_value():
        module = Net(16)
        module.scale.factor_of_today = float(torch.rand(()))
        return module, (torch.ones(1, 8),)


    def no_module():
        return 42
    """
)

LAYERS = textwrap.dedent(
    """
    import torch
    from torch import nn


    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factors = [torch.full((1,), 2.0), torch.rand(1)]
            self.factor_of_today = 1.0

        def forward(self, x):
            return x * self.factors[0] * self.factors[1] * self.factor_of_today
    """
)


def save_factories(directory: Path) -> Path:
    """A directory with ``factories.py``, which imports from a file beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "factories.py").write_text(FACTORIES)
    (directory / "layers.py").write_text(LAYERS)
    return directory
