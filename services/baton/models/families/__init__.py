"""The model families, a file each: the fields of its config.json, and how it departs from Llama. Imports no
torch: the router reads configs, too."""
