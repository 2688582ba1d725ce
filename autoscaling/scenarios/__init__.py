"""The scenarios that ship with us, one YAML file each; `simulator.scenario` reads them."""
