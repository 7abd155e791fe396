"""Training runs that a YAML file describes: `unitrain train config.yaml`.

    sources        reads the files, and finds the line of a key
    imports        imports the modules of the classes and functions
    parser         the keys and their types, command-line overrides, and errors that name the file, line and key
    settings       creates TrainConfig, and checks values before the ranks communicate
    instantiation  creates the model, the data and the other arguments of `Trainer` and `fit`
    training       trains, and determines the resolved configuration

The package jsonargparse, which parses the files, is imported on first use, because it is optional.
"""
