# One task that runs testdata/probe.c on devices, and starts again when it ends.
job "@NAME@" {
  type = "service"

  group "gpus" {
    restart {
      attempts = 10
      delay    = "1s"
      mode     = "delay"
    }

    @VOLUME@

    task "gpus" {
      driver = "@DRIVER@"
      config {
        @CONFIG@
      }
      @MORE@
      resources {
        cpu    = 50
        memory = @MEMORY@
        @DEVICES@
      }
    }
  }
}
