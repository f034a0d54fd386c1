"""The steps on users' data: cached or not, in one pass or many, together or alone: the same numbers."""

import pytest
import torch
from ragged_users import configure
from torch.nn.functional import cross_entropy

from pina_flwr.config import ConfigError
from pina_flwr.models.backbone import Backbone
from pina_flwr.training import workbench
from pina_flwr.training.workbench import is_slow, least, open_workbench, pick_device

ALL = list(range(6))


def cluster_models(work, count=3):
    noise = torch.randn((count, work.backbone.spec.size), generator=torch.Generator().manual_seed(4))
    return work.backbone.spec.start() + 0.2 * noise


def everything(work):
    """All that a run asks of a workbench."""
    models = cluster_models(work)
    choices = torch.tensor([0, 1, 2, 0, 1, 2])
    return {
        "deltas": work.stage1_signals(ALL),
        "losses": work.losses(ALL, models),
        "updates": work.train(ALL, models, choices, round_=3)[0],
        "correct": torch.cat([x.flatten() for x in work.test_correct(models, [0, 1, 2, 3], 1, 2)]),
    }


def assert_same(a, b):
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


class Forbidden(Exception):
    pass


def forbid_prefix(monkeypatch):
    def prefix(*_):
        raise Forbidden

    monkeypatch.setattr(Backbone, "prefix", prefix)


class TestCache:
    @pytest.mark.parametrize("augment", [1, 2])
    def test_cached_equals_uncached(self, bench, tmp_path, monkeypatch, augment):
        uncached = everything(bench(cache_gib=0.0, augment=augment))
        in_memory = everything(bench(cache_gib=1.0, augment=augment))
        options = {"cache_gib": 0.0, "augment": augment, "cache_dir": str(tmp_path)}
        writing = everything(bench(**options))
        second_run = bench(**options)
        forbid_prefix(monkeypatch)
        reading = everything(second_run)
        for other in (in_memory, writing, reading):
            assert all(torch.equal(uncached[name], other[name]) for name in uncached)

    def test_prefix_runs_once_an_image(self, bench, monkeypatch):
        work = bench()
        everything(work)
        forbid_prefix(monkeypatch)
        everything(work)
        with pytest.raises(Forbidden):
            bench(cache_gib=0.0).losses([0], cluster_models(work))

    @pytest.mark.parametrize("options", [{"seed": 2}, {"lora_layers": 2}, {"augment": 2}, {"rotations": 2}])
    def test_a_run_with_other_activations_takes_none_of_them(self, bench, tmp_path, options):
        everything(bench(cache_dir=str(tmp_path)))
        mixed = everything(bench(cache_dir=str(tmp_path), clusters=2, **options))
        assert_same(mixed, everything(bench(clusters=2, **options)))
        assert len(list(tmp_path.iterdir())) == 2

    def test_damaged_folder(self, bench, tmp_path):
        expected = everything(bench(cache_dir=str(tmp_path)))
        files = sorted(tmp_path.rglob("*.safetensors"))
        assert len(files) == 6 + 4
        for i, file in enumerate(files):
            content = bytearray(file.read_bytes())
            content[-1 - i] ^= 255
            file.write_bytes(content[: len(content) - i % 2])
        assert_same(expected, everything(bench(cache_dir=str(tmp_path))))


class TestPasses:
    @pytest.mark.parametrize("numbers", [1, 17 * 64 * 8, 17 * 64 * 20])
    @pytest.mark.parametrize("batch_size", [0, 3])
    def test_many_passes_equal_one(self, bench, monkeypatch, numbers, batch_size):
        one = everything(bench(batch_size=batch_size))
        monkeypatch.setattr(workbench, "PASS_NUMBERS", numbers)
        monkeypatch.setattr(workbench, "PREFIX_IMAGES", 3)
        assert_same(everything(bench(batch_size=batch_size)), one)

    def test_a_pass_is_bounded_with_its_padding(self, bench, monkeypatch):
        """Users of 5, 3, 8, 1, 6, 3 images in passes of at most 16 padded images."""
        monkeypatch.setattr(workbench, "PASS_NUMBERS", 16 * 17 * 64)
        passes = [(ids, tuple(batch.weights.shape)) for ids, batch in bench()._passes(ALL)]
        assert passes == [([0, 1], (2, 5)), ([2, 3], (2, 8)), ([4, 5], (2, 6))]

    def test_a_user_larger_than_a_pass_goes_alone(self, bench, monkeypatch):
        monkeypatch.setattr(workbench, "PASS_NUMBERS", 1)
        assert [ids for ids, _ in bench()._passes([4, 2, 0])] == [[4], [2], [0]]


class TestSteps:
    def test_users_alone_or_in_company(self, bench):
        work = bench(batch_size=2)
        models, choices = cluster_models(work), torch.tensor([0, 1, 2, 0, 1, 2])
        updates, _ = work.train(ALL, models, choices, 3)
        losses, deltas = work.losses(ALL, models), work.stage1_signals(ALL)
        other = bench(batch_size=2)
        for user in (5, 2, 3):
            alone, _ = other.train([user], models, choices[user : user + 1], 3)
            torch.testing.assert_close(alone[0], updates[user], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(other.losses([user], models)[0], losses[user], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(other.stage1_signals([user])[0], deltas[user], rtol=1e-4, atol=1e-5)

    def test_update_moves_the_chosen_model(self, bench):
        work = bench()
        models = cluster_models(work)
        for choice in range(3):
            (update,), _ = work.train([2], models, torch.tensor([choice]), 1)
            moved = models.clone()
            moved[choice] += update
            before, after = work.losses([2], models)[0], work.losses([2], moved)[0]
            assert after[choice] < before[choice]
            assert update.norm() > 0

    @pytest.mark.parametrize("numbers", [1, workbench.PASS_NUMBERS])
    def test_users_pick_the_model_of_least_loss(self, bench, monkeypatch, numbers):
        """Eq. 6: left to themselves, users train what they would train if told their argmin."""
        monkeypatch.setattr(workbench, "PASS_NUMBERS", numbers)
        work = bench()
        models = cluster_models(work)
        expected = work.losses(ALL, models).argmin(1)
        assert len(expected.unique()) > 1
        updates, chosen = work.train(ALL, models, None, 3)
        assert torch.equal(chosen, expected)
        told, same = work.train(ALL, models, expected, 3)
        assert torch.equal(updates, told)
        assert torch.equal(same, expected)

    def test_a_model_without_finite_loss_is_not_picked(self, bench):
        nan, inf = float("nan"), float("inf")
        table = torch.tensor([[nan, 3, 2], [inf, 3, 4], [-inf, 9, 8], [1, nan, inf], [nan, nan, nan]])
        assert least(table).tolist() == [2, 1, 2, 0, 0]
        work = bench()
        models = cluster_models(work)
        models[1] *= nan
        assert 1 not in work.train(ALL, models, None, 1)[1]

    def test_losses_are_those_of_the_users_images(self, bench):
        work = bench()
        models = cluster_models(work)
        spec, backbone = work.backbone.spec, work.backbone
        for user in (0, 3):
            hidden = backbone.prefix(backbone.pixels(work.users.images(user))).bfloat16().float()
            for c in range(3):
                scores = backbone.logits(
                    backbone.prepare(hidden[None]), spec.unflatten(models[c : c + 1]), spec.lora_scale
                )
                expected = cross_entropy(scores[0], work.users.labels(user))
                torch.testing.assert_close(work.losses([user], models)[0, c], expected, rtol=1e-4, atol=1e-5)

    def test_rounds_shuffle_anew(self, bench):
        work = bench(batch_size=2)
        models, choice = cluster_models(work), torch.tensor([0])
        a, b, c = (work.train([2], models, choice, round_)[0][0] for round_ in (1, 1, 2))
        assert torch.equal(a, b)
        assert not torch.allclose(a, c)

    def test_stage_1_trains_once_and_in_any_order(self, bench, monkeypatch):
        work = bench()
        first = work.stage1_signals([4, 1])
        assert first.shape == (2, work.backbone.sketch.size)
        assert (first.norm(dim=1) > 0).all()
        rest = work.stage1_signals([1, 0, 4])
        assert torch.equal(rest[[2, 0]], first)
        forbid_prefix(monkeypatch)
        assert torch.equal(work.stage1_signals([0])[0], rest[1])

    def test_stage_1_targets(self, bench):
        """A uniform target uses no label: users with the same images have the same ΔB."""
        for target, same in [("uniform", True), ("labels", False)]:
            work = bench(sketch_target=target)
            work.users.rows[1] = work.users.rows[0][:3]
            honest = work.stage1_signals([1])
            work._signals.clear()
            labels = work.users.tables.train.labels
            labels[work.users.rows[1]] = (labels[work.users.rows[1]] + 5) % 10
            assert torch.allclose(honest, work.stage1_signals([1])) is same

    def test_features_are_means_over_a_users_images(self, bench, monkeypatch):
        work = bench(stage1_signal="features")
        monkeypatch.setattr(workbench, "PREFIX_IMAGES", 3)
        found = work.stage1_signals(ALL)
        assert found.shape == (6, work.backbone.shapes.sketch) == (6, 4 * 64)
        for user in ALL:
            each = [
                work.backbone.mean_features(work.backbone.pixels(i[None])) for i in work.users.images(user)
            ]
            torch.testing.assert_close(found[user], torch.stack(each).mean(0), rtol=0.01, atol=0.01)
        assert torch.equal(work.stage1_signals([4, 1]), found[[4, 1]])

    def test_features_of_another_layer_or_grid_are_kept_apart(self, bench, tmp_path):
        """A folder of activations may serve runs that differ in these options only."""
        kept = {"stage1_signal": "features", "cache_dir": str(tmp_path), "features_grid": 1}
        for options in (
            {"features_layer": 2},
            {"features_layer": 3},
            {"features_layer": 3, "features_grid": 2},
        ):
            fresh = bench(**(kept | options | {"cache_dir": ""})).stage1_signals(ALL)
            for _ in range(2):
                torch.testing.assert_close(bench(**(kept | options)).stage1_signals(ALL), fresh)

    def test_right_answers(self, bench):
        work = bench()
        models = cluster_models(work)
        spec, backbone = work.backbone.spec, work.backbone
        correct, total = work.test_correct(models, [3, 0], 0, 1)
        assert total.tolist() == [20, 20]
        for row, group in enumerate([3, 0]):
            hidden = backbone.prefix(backbone.pixels(work.users.test_images(group))).bfloat16().float()
            for c in range(3):
                scores = backbone.logits(
                    backbone.prepare(hidden[None]), spec.unflatten(models[c : c + 1]), spec.lora_scale
                )
                right = (scores[0].argmax(-1) == work.users.test_labels(group)).sum()
                assert correct[row, c] == right

    def test_parts_of_the_test_images_add_up(self, bench, monkeypatch):
        work = bench()
        models = cluster_models(work)
        whole = work.test_correct(models, [0, 1], 0, 1)
        monkeypatch.setattr(workbench, "PASS_NUMBERS", 3 * 17 * 64)
        for parts in (3, 25):  # more parts than images: some are empty
            shares = [work.test_correct(models, [0, 1], part, parts) for part in range(parts)]
            for i in range(2):
                assert torch.equal(sum(share[i] for share in shares), whole[i])

    def test_nobody(self, bench):
        work = bench()
        models = cluster_models(work)
        d = work.backbone.spec.size
        assert work.stage1_signals([]).shape == (0, work.backbone.sketch.size)
        assert work.losses([], models).shape == (0, 3)
        for choices in (None, torch.zeros(0, dtype=torch.int64)):
            updates, chosen = work.train([], models, choices, 1)
            assert (updates.shape, chosen.shape, chosen.dtype) == ((0, d), (0,), torch.int64)
        assert [tuple(x.shape) for x in work.test_correct(models, [], 0, 1)] == [(0, 3), (0,)]

    def test_frozen_parts_are_in_no_update(self, bench):
        work = bench(lora_train_a=False, train_head=False)
        models = work.backbone.spec.start()[None]
        (update,), _ = work.train([0], models, torch.tensor([0]), 1)
        assert update.shape == (2 * 64 * 4,)


class TestPrecision:
    def test_bfloat16_is_near_float32(self, bench):
        exact, coarse = everything(bench()), everything(bench(precision="bfloat16"))
        for name in ("deltas", "losses", "updates"):
            assert coarse[name].dtype == torch.float32
            difference = (coarse[name] - exact[name]).norm() / exact[name].norm()
            assert 0 < difference < 0.05

    def test_bfloat16_side_by_side_is_near_one_by_one(self, bench, monkeypatch):
        together = everything(bench(precision="bfloat16"))
        monkeypatch.setattr(workbench, "PASS_NUMBERS", 1)
        alone = everything(bench(precision="bfloat16"))
        for name in ("deltas", "losses", "updates"):
            assert (together[name] - alone[name]).norm() < 0.02 * alone[name].norm()


class TestOpening:
    def test_device(self):
        assert pick_device("cpu") == torch.device("cpu")
        assert pick_device("auto").type in ("cpu", "cuda")

    @pytest.mark.parametrize("name", ["cuda:77", "cuda:999", "cuda:007"])
    def test_device_that_is_not_there(self, name):
        with pytest.raises(
            ConfigError, match=rf"^device = '{name}': not available here \(.*\); use auto or cpu$"
        ) as error:
            pick_device(name)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        "name",
        [
            "",
            "gpu",
            "cpu:0",
            "cpu:x",
            "mps",
            "meta",
            "xpu",
            "CPU",
            "cuda:",
            "cuda:-1",
            "cuda:٣",
            "cuda:10000",
        ],
    )
    def test_device_that_cannot_be(self, name):
        with pytest.raises(ConfigError) as error:
            pick_device(name)
        assert str(error.value) == f"device = {name!r}: must be auto, cpu, cuda or cuda:N"

    @pytest.mark.parametrize(
        ("precision", "capability", "device", "slow"),
        [
            ("bfloat16", "AVX2", "cpu", True),
            ("bfloat16", "DEFAULT", "cpu", True),
            ("bfloat16", "AVX512", "cpu", False),
            ("bfloat16", "AVX2", "cuda", False),
            ("float32", "AVX2", "cpu", False),
        ],
    )
    def test_arithmetic_that_takes_ages_is_told(
        self, monkeypatch, flwr_log, precision, capability, device, slow
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        assert is_slow(precision, torch.device(device)) is slow
        if device == "cpu":
            open_workbench(configure(precision=precision, seed=77 if slow else 78))
            open_workbench.cache_clear()
            assert ("has no such arithmetic" in flwr_log.text) is slow

    def test_kept_between_messages(self):
        config = configure()
        assert open_workbench(config) is open_workbench(configure())
        assert open_workbench(configure(seed=2)) is not open_workbench(config)

    @pytest.mark.parametrize(
        ("options", "start"),
        [
            ({"dataset": "/no/such/folder"}, "dataset = "),
            ({"backbone": "/no/such/folder"}, "backbone = "),
            ({"device": "cuda:77"}, "device = "),
            ({"num_users": 10**6}, "num-users = "),
        ],
    )
    def test_mistakes_come_out_in_one_line(self, options, start):
        with pytest.raises(ConfigError, match=f"^{start}"):
            open_workbench(configure(**options))
