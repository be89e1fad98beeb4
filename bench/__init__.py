from cuadrilla.host.process import sleep_early

sleep_early()  # as in the command `cuadrilla`: it must be called before torch is loaded
