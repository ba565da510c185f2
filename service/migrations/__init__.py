"""The database schema, revision by revision (Alembic); run at the service's start by thinwire.service.db."""
