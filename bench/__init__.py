from cuadrilla.host.openmp import sleep_early

sleep_early()  # as the command does, before torch is loaded
