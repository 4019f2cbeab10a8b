"""The main job on real models, every answer checked."""
