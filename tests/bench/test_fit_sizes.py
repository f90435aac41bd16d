"""The fit of program sizes: it meets what it was made of, and its text is what the plan reads."""

from dataclasses import replace

import pytest

from bench import fit_sizes
from tests.precompile.named import model_on
from tpu_vl.precompile import program_sizes
from tpu_vl.precompile.footprint import model_shape
from tpu_vl.precompile.program_sizes import FITTED, ProgramSize

MODEL = model_on("qwen3_vl_8b", "v6e:2x2", tensor_parallel_size=4)
SHAPE = model_shape(MODEL.family, MODEL.cfg, MODEL.mesh)


def measured_by(fit: program_sizes.Fit) -> fit_sizes.Measured:
    """What a compiler would measure that follows these constants."""
    e = MODEL.engine_config
    short = program_sizes.text_size(
        replace(SHAPE, num_layers=fit_sizes.SHORT_LAYERS), e.token_capacities[0], fit
    )
    sizes = program_sizes.program_sizes(SHAPE, e, fit)
    return fit_sizes.Measured(shape=SHAPE, engine_config=e, sizes=sizes, short=short)


def test_a_fit_meets_the_programs_that_it_was_made_of() -> None:
    tables = {"text_code": {4: 1.5, 16: 9.25, 64: 3.0, 256: 50.0, 1024: 60.0, 2048: 70.0}}
    true = replace(FITTED, layer_temporaries=0.5, encode_copies=1.3, encode_spared=20.0, **tables)
    measured = measured_by(true)
    found = fit_sizes.fit(measured)
    again = program_sizes.program_sizes(SHAPE, MODEL.engine_config, found)
    assert again.keys() == measured.sizes.keys()
    for name, size in measured.sizes.items():
        assert again[name].temporaries == pytest.approx(size.temporaries, rel=0.01), name
        assert again[name].code == pytest.approx(size.code, rel=0.01), name
        assert again[name].compile_s == pytest.approx(size.compile_s, abs=1), name
    assert found.layer_temporaries == pytest.approx(0.5, rel=0.01)
    assert found.encode_copies == pytest.approx(1.3, rel=0.01)


def test_the_text_of_the_constants_is_what_the_plan_reads() -> None:
    text = fit_sizes.source(FITTED)
    read: dict[str, object] = {}
    exec(text, {"Fit": program_sizes.Fit}, read)
    assert read["FITTED"] == FITTED
    kept = fit_sizes.SOURCE.read_text()
    other = fit_sizes.replaced(
        kept, r"^FITTED = Fit\(.*?^\)\n", fit_sizes.source(replace(FITTED, width=7))
    )
    assert "    width=7,\n" in other
    assert other.count("FITTED = Fit(") == 1
    assert other.endswith(kept[-200:])


def test_the_table_of_the_document_is_the_one_that_is_written() -> None:
    sizes = {"zeros": ProgramSize(temporaries=0, code=10**5, compile_s=1.0)}
    sizes["text/4"] = ProgramSize(temporaries=3 * 10**6, code=2 * 10**6, compile_s=1.0)
    text = fit_sizes.table(sizes, sizes)
    assert "| text/4 | 3.0 | 3.0 | 2.0 | 2.0 |\n| largest, sum | 3.0 | 3.0 | 2.1 | 2.1 |" in text
    document = fit_sizes.DOCUMENT.read_text()
    assert document.count(text.partition("\n")[0]) == 1
    assert document.count("\n| largest, sum |") == 1
