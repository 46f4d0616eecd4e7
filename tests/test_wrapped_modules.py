"""A plan is that of the bare model, whatever wraps or shards the model's parts."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import learnable_multipliers as lrm
from families import FAMILIES, MORE_FAMILIES, FusedBlock, HandWritten, build
from learnable_multipliers._initialize import fixed_multipliers

OWN = {"hand-written": HandWritten, "fused": FusedBlock}
WRAPPERS = {"torch.compile": torch.compile, "checkpointing": checkpoint_wrapper}
PLACEMENTS = ("full", "scalar", "symmetry-aware")


def made(family):
    return OWN[family]() if family in OWN else build(family)


def wrap_everything(model, wrapper):
    for name, module in reversed(list(model.named_modules())):
        # A list of layers is read by its index.
        if name and not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            holder, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(holder), leaf, wrapper(module))


def plans(model):
    texts = []
    for placement in PLACEMENTS:
        try:
            texts.append(lrm.plan(model, placement).to_json())
        except ValueError as error:
            # The symmetry-aware placement asks for rules where roles are unknown.
            texts.append(str(error))
    return texts


@pytest.fixture
def mesh():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES, *OWN])
def test_a_plan_sees_through_wrappers_of_modules(family, wrapper):
    expected = plans(made(family))
    model = made(family)
    wrap_everything(model, WRAPPERS[wrapper])
    assert plans(model) == expected


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::FutureWarning:torch.*")
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES, *OWN])
def test_a_plan_of_a_sharded_model_is_that_of_the_bare_one(family, mesh):
    expected = plans(made(family))
    model = made(family)
    for name, module in reversed(list(model.named_modules())):
        # Tied weights have to be in one group, that of the root.
        in_layer = any(part.isdigit() for part in name.split("."))
        if in_layer and [*module.parameters()] and not isinstance(module, nn.ModuleList):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert plans(model) == expected


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_fixed_multipliers_of_a_wrapped_model_are_found_once(wrapper):
    expected = fixed_multipliers(build("falcon-h1", embedding_multiplier=3.0))
    model = build("falcon-h1", embedding_multiplier=3.0)
    holder = nn.ModuleDict({"net": WRAPPERS[wrapper](model)})
    multipliers = fixed_multipliers(holder)
    assert [(m.field, m.value) for m in multipliers] == [(m.field, m.value) for m in expected]
    assert [t for m in multipliers for t in m.targets] == [
        (f"net.{path}", role) for m in expected for path, role in m.targets
    ]


class Task(nn.Module):
    """What Lightning and training scripts put around a model."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.loss = nn.CrossEntropyLoss()


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES, *OWN])
def test_a_plan_of_a_model_in_a_module_has_the_same_entries(family):
    expected = {
        f"net.{entry.name}": (entry.role, entry.multipliers)
        for entry in lrm.plan(made(family)).entries
    }
    inside = lrm.plan(Task(made(family))).entries
    assert {entry.name: (entry.role, entry.multipliers) for entry in inside} == expected


@pytest.mark.parametrize("name", ["ViTForImageClassification", "LlamaForSequenceClassification"])
def test_heads_of_classifiers_are_heads_inside_a_module_too(name):
    import transformers

    cls = getattr(transformers, name)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = cls(cls.config_class(**sizes, num_hidden_layers=1))
    heads = [e.name for e in lrm.plan(model).entries if e.role == "head"]
    assert heads in (["classifier.weight"], ["score.weight"])
    inside = [e for e in lrm.plan(Task(model)).entries if e.role == "head"]
    assert [e.name for e in inside] == [f"net.{heads[0]}"]
    assert not inside[0].carries
    optimizer = lrm.Muon.from_model(Task(model))
    assert f"net.{heads[0]}" not in muon_matrices(optimizer)


def muon_matrices(optimizer):
    from learnable_multipliers.optim._muon import is_hidden

    return {s.name for s in optimizer.parameter_states() if s.matrix and is_hidden(s.matrix)}


def test_a_head_that_peft_trains_a_copy_of_is_a_head():
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForSequenceClassification(LlamaConfig(**sizes, num_hidden_layers=1))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")
    entries = {e.name: e for e in lrm.plan(peft.get_peft_model(model, config)).entries}
    copy = entries["base_model.model.score.modules_to_save.default.weight"]
    assert (copy.role, copy.carries) == ("head", False)


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm((4, 8)), lambda: nn.RMSNorm((4, 8))])
def test_a_norm_weight_of_two_axes_is_a_vector_and_does_not_decay(make):
    model = nn.Sequential(nn.Linear(8, 8), make())
    entry = next(e for e in lrm.plan(model).entries if e.name == "1.weight")
    assert not entry.carries
    assert entry.matrix is None
    optimizer = lrm.Muon.from_model(model, weight_decay=0.5)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert torch.equal(model[1].weight, torch.ones(4, 8))


def test_norms_of_queries_and_keys_by_head_are_vectors():
    from transformers import CohereConfig, CohereForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = CohereForCausalLM(CohereConfig(**sizes, num_hidden_layers=1, use_qk_norm=True))
    entries = {e.name: e for e in lrm.plan(model).entries}
    for leaf in ("q_norm", "k_norm"):
        assert entries[f"model.layers.0.self_attn.{leaf}.weight"].matrix is None
