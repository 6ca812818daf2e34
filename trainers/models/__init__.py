"""Neural networks built from a model spec."""

from trainers.models.build import TrainModel, build_model

__all__ = ["TrainModel", "build_model"]
