"""How the tables of the shadow's records came to be, one file a change; Alembic applies what a database lacks."""
