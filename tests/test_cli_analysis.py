"""Commands that look at models and runs: words and JSON against the library's own numbers."""

import json
import re

import pytest

import learnable_multipliers as lrm
from learnable_multipliers.pretrain.models.hybrid import build
from learnable_multipliers.pretrain.models.presets import PRESETS

# -- symmetries -------------------------------------------------------------------------------


def test_symmetries_of_a_preset_are_told_in_words(ask):
    code, text, complaints = ask("symmetries", "tiny", "--placement", "scalar")
    assert (code, complaints) == (0, "")
    model = build(PRESETS["tiny"])
    expected = lrm.find_symmetries(model, lrm.plan(model, "scalar"))
    head, _, rest = text.partition("\n\n")
    assert re.fullmatch(
        rf"tiny, the scalar placement: {len(expected)} symmetries, found in \d+\.\d s", head
    )
    assert rest == f"{expected.summary()}\n"


@pytest.mark.parametrize("kind", ["Llama", "Bert"])
def test_symmetries_of_a_hugging_face_folder_as_json(ask, kind):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        type_vocab_size=1,
    )
    config.save_pretrained("model")
    code, text, _ = ask("symmetries", "model", "--json")
    assert code == 0
    written = json.loads(text)
    assert (written["model"], written["placement"]) == ("model", "all")
    model = transformers.AutoModelForCausalLM.from_config(config)
    expected = lrm.find_symmetries(model, None)
    assert written["nullity"] == expected.nullity
    assert written["exchanges"] == expected.num_exchanges > 0
    assert [
        {(t["name"], t["axis"], t["block"]): t["power"] for t in symmetry["terms"]}
        for symmetry in written["symmetries"]
    ] == [symmetry.exponents for symmetry in expected]
    assert sum(s["members"] for s in written["symmetries"]) == expected.nullity
