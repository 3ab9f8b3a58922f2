"""The script that reproduces a case without this harness: its program, the plain loop, and the trainer."""

from __future__ import annotations

import inspect
import textwrap

from tests.adversarial import reference
from tests.adversarial.case import Case
from tests.adversarial.verdict import Verdict

_MAIN = """
def main():
    expected = train_plainly(
        globals(), SETTINGS, micro_batch={micro_batch}, evaluates={evaluates}, is_called={is_called}
    )
    model = make_model()
    optimizer = {optimizer}
    scheduler = {scheduler}
    folder = tempfile.mkdtemp()
    trainer = Trainer(
        model, loss_fn=make_loss(), optimizer=optimizer, scheduler=scheduler, device="cpu", progress=False,
        run_dir=folder + "/first", **STRATEGY, **FIRST,
    )
    trainer.fit(make_loader(make_data()){validation})
    report("trained", trainer.model, expected)
{resume}

def report(what, model, expected):
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor) and value.numel():
            print(f"{{what}}: {{name}} is off by {{(value - expected['model'][name]).abs().max().item():.2g}}")


if __name__ == "__main__":
    main()
"""
_RESUME = """
    again = make_model()
    optimizer = {optimizer}
    scheduler = {scheduler}
    trainer = Trainer(
        again, loss_fn=make_loss(), optimizer=optimizer, scheduler=scheduler, device="cpu", progress=False,
        run_dir=folder + "/second", resume_from_checkpoint=folder + "/first/checkpoints/step-{step:06d}", **AGAIN,
    )
    trainer.fit(make_loader(make_data()){validation})
    report("resumed", again, expected)
"""


def script_of(case: Case, verdict: Verdict | None = None) -> str:
    """Runs with the library installed: `python case_7.py`."""
    plain = inspect.getsource(reference).split("from __future__ import annotations\n", 1)[1]
    told = str(case) if verdict is None else f"{case}\n\n{verdict.why}\n{verdict.detail[-1200:]}"
    head = '"""' + told.replace('"""', "'''").replace("\\", "/") + '\n"""\n\nfrom __future__ import annotations\n'
    optimizer = "make_optimizer" if case.is_called else "make_optimizer(model)"
    scheduler = "None" if "def make_scheduler(optimizer):\n    return None" in case.text else (
        "make_scheduler" if case.is_called else "make_scheduler(optimizer)"
    )  # fmt: skip
    validation = ", make_data()" if case.evaluates else ""
    first = {"checkpoint_frequency": f"{case.resume_step} steps"} if case.again else {}
    resume = ""
    if case.again is not None:
        made = optimizer.replace("(model)", "(again)")
        resume = _RESUME.format(optimizer=made, scheduler=scheduler, step=case.resume_step, validation=validation)
    parts = [
        head + "\nimport tempfile\n\nfrom distributed import Trainer\n" + plain,
        case.text,
        f"SETTINGS = {case.settings!r}\nSTRATEGY = {case.settings_for(case.strategy)!r}\nFIRST = {first!r}",
        f"AGAIN = {case.settings_for(case.again)!r}" if case.again else "",
        _MAIN.format(
            micro_batch=case.micro_batch,
            evaluates=case.evaluates,
            is_called=case.is_called,
            optimizer=optimizer,
            scheduler=scheduler,
            validation=validation,
            resume=textwrap.dedent(resume) and resume,
        ),
    ]
    return "\n\n".join(filter(None, parts))
