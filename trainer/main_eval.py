"""python -m trainer.main_eval key=value ...: answers to validation prompts, graded."""

from rlsys.config import EvalConfig
from trainer.job import job_main

main = job_main(EvalConfig, "trainer.evaluation:run_evaluation")

if __name__ == "__main__":
    raise SystemExit(main())
