"""The output of `shoal bench`; tests/process/test_cli.py has its measurements."""

from shoal.bench.offline import table


def test_the_benchs_table_says_its_units():
    figures = {
        "seconds": 2.0,
        "requests_per_s": 8.0,
        "prompt_tokens_per_s": 1024.0,
        "output_tokens_per_s": 512.0,
        "total_tokens_per_s": 1536.0,
        "ms_per_token": 31.25,
        "fraction_of_floor": 0.5,
        "bytes_per_s": 2e10,
        "flops_per_s": 3e11,
        "gpu_idle_share": 0.125,
    }
    text = table(figures)
    for value in (
        "2.000 s",
        "8.00 requests/s",
        "1024.0 prompt tokens/s",
        "512.0 output tokens/s",
        "31.25 ms",
        "50% of the estimate",
        "20 GB/s",
        "300 GFLOP/s",
        "12.5%",
    ):
        assert value in text
    assert "GPU" not in table(figures | {"gpu_idle_share": None})
