"""One process or many: the only package that knows ranks and meshes."""
