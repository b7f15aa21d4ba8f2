"""MLflow's model registry as a target: it points to a release that stands at another target."""

from mergegate.tasks.publish.targets.mlflow.target import MlflowTarget

__all__ = ["MlflowTarget"]
