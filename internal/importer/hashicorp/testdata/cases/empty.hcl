plugin "nvidia" { config { } }
