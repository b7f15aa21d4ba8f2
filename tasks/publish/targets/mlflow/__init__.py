"""Register a release in MLflow's model registry. The registered version points to a release at another target."""

from mergegate.tasks.publish.targets.mlflow.target import MlflowTarget

__all__ = ["MlflowTarget"]
