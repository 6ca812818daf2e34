import pytest
import yaml

from planner.cost.dense import Product, dense_network, parameters, weights
from planner.cost.dense_time import backward_seconds, forward_seconds, saved_activation_bytes
from planner.cost.gemm import Shape
from planner.specs.load import load_model
from planner.specs.model import Architecture
from tests.cost.helpers import context, data_file, small_model

PUBLISHED = {
    "dlrm": "dlrm_dcnv2",
    "dlrm_v1_1tb": "dlrm_v1_1tb",
    "dlrm_kaggle": "dlrm_kaggle",
    "dlrm_1tb_10m": "dlrm_1tb_10m",
    "hugectr_180t_70b_hot80": "hugectr_180t_70b_hot80",
    "hugectr_7t_470b_hot20": "hugectr_7t_470b_hot20",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_equal_published_counts(name: str) -> None:
    published = yaml.safe_load(data_file("models/models.yaml").read_text())
    derived = published[PUBLISHED[name]]["derived"]
    network = dense_network(load_model(name))
    assert weights(network.blocks) == derived["dense_params"]
    flops = sum(
        2 * shape.m * shape.n * shape.k
        for block in network.blocks
        for linear in block.linears
        for shape in [linear.forward(1)]
    )
    # The published count takes each pair of a dot interaction once.
    flops += sum(
        product.m * (product.m - 1) * product.k
        for block in network.blocks
        for product in block.products
        if isinstance(product, Product)
    )
    assert flops / 1e6 == pytest.approx(derived["fwd_mflop_per_sample"], rel=0.005)


@pytest.mark.parametrize(
    "name", ["dlrm", "dlrm_kaggle", "deepfm_criteo", "de_tiny", "de_medium", "dlrm_criteo_small"]
)
def test_parameters_equal_the_trained_network(name: str) -> None:
    torch = pytest.importorskip("torch")
    networks = pytest.importorskip("trainers.models.networks")
    model = load_model(name)
    with torch.device("meta"):
        network = networks.build_network(model)
    trained = sum(parameter.numel() for parameter in network.parameters())
    assert parameters(dense_network(model).blocks) == trained


def test_small_model_by_hand() -> None:
    network = dense_network(small_model())
    # Bottom 13*8+8 + 8*4+4; three vectors give 3 pairs, so the top reads 4 + 3 columns.
    assert parameters(network.bottom) == 13 * 8 + 8 + 8 * 4 + 4
    assert parameters(network.top) == 7 * 16 + 16 + 16 + 1
    first = network.bottom[0].linears[0]
    assert first.forward(64) == Shape(64, 8, 13)
    assert first.backward(64) == (Shape(8, 13, 64),)  # no gradient of the dense features
    assert network.bottom[0].linears[1].backward(64) == (Shape(4, 8, 64), Shape(64, 8, 4))


def test_saved_activations_by_hand() -> None:
    # Bottom: input 13, ReLU outputs 8 + 4. Dot: 3 vectors of 4. Top: input 7, ReLU output 16.
    floats = (13 + 8 + 4) + 3 * 4 + (7 + 16)
    assert saved_activation_bytes(context(local_batch=64)) == 64 * 4 * floats
    # Full: both MLPs' inputs, the interaction's, and the larger MLP while it runs again.
    kept = 13 + 7 + 3 * 4 + max(13 + 8 + 4, 7 + 16)
    assert saved_activation_bytes(context(local_batch=64, recompute="full")) == 64 * 4 * kept


def test_full_recompute_costs_the_mlps_forward() -> None:
    plain, full = context(local_batch=4096), context(local_batch=4096, recompute="full")
    network = dense_network(plain.model)
    mlps = [block for block in network.top if block.recomputable]
    extra = backward_seconds(full, network.top) - backward_seconds(plain, network.top)
    assert extra == pytest.approx(forward_seconds(plain, mlps), rel=1e-9)


def test_every_architecture_has_positive_work() -> None:
    seen = set()
    for name in ("dlrm", "dlrm_kaggle", "deepfm_criteo", "de_medium", "wukong_criteo"):
        model = load_model(name)
        seen.add(model.arch)
        ctx = context(model=model, local_batch=128)
        assert forward_seconds(ctx, dense_network(model).blocks) > 0
        assert saved_activation_bytes(ctx) > 0
    assert seen == set(Architecture)
