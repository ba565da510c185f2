"""The control plane: who asked for what. FastAPI and SQLAlchemy; neither torch nor ray."""
