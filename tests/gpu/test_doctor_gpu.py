"""`shoal doctor` on a machine with a GPU: it sees what torch sees, and everything that it finds there works."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def findings():
    words = [sys.executable, "-m", "shoal", "doctor", "--device", "cuda", "--port", "0", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert not done.stderr
    print(done.stdout)
    return {one["about"]: one for one in json.loads(done.stdout)["findings"]}


def test_every_gpu_is_found_with_its_name_and_its_memory(findings):
    for index in range(torch.cuda.device_count()):
        assert torch.cuda.get_device_name(index) in findings[f"GPU {index}"]["found"]
        assert findings[f"GPU {index}"]["verdict"] != "fails"


def test_torch_fits_the_driver_and_a_kernel_is_compiled_and_right(findings):
    assert findings["torch"]["verdict"] == findings["CUDA"]["verdict"] == "works"
    assert findings["Triton"]["verdict"] == "works", findings["Triton"]


def test_copies_between_host_and_gpu_are_measured(findings):
    assert "GB/s to the GPU" in findings["GPU 0 and host"]["found"]


def test_no_gpu_is_left_of_those_that_are_asked_for(tmp_path):
    """Hidden from torch, they are named as hidden."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", "shoal", "doctor", "--device", "cuda", "--port", "0", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)
    found = {one["about"]: one for one in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1 and found["CUDA"]["verdict"] == "fails"
