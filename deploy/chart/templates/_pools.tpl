{{/*
The DaemonSets of the chart, as JSON {"pools": [{name, config, nodeSelector, without, values}]}: each pool, and the nodes of no pool
last, with an empty name. "without" are the node selectors of the pools whose nodes it does not have: the first pool that matches applies.
*/}}
{{- define "tandem.pools" -}}
{{- $root := . -}}
{{- $default := include "tandem.defaultConfig" . -}}
{{- $given := .Values.pools | default list -}}
{{- if not $given -}}
{{- range $name := keys (default dict .Values.config.map) | sortAlpha -}}
{{- if ne $name $default -}}
{{- $given = append $given (dict "name" (include "tandem.dnsName" $name) "config" $name "nodeSelector" (dict "nvidia.com/device-plugin.config" $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $pools := list -}}
{{- $without := list -}}
{{- range $given -}}
{{- $values := include "tandem.merged" (dict "base" $root.Values "pool" .) | fromJson -}}
{{- $pools = append $pools (dict "name" .name "config" (default $default .config) "nodeSelector" .nodeSelector "without" $without "values" $values) -}}
{{- $without = append $without .nodeSelector -}}
{{- end -}}
{{- $rest := include "tandem.merged" (dict "base" $root.Values "pool" dict) | fromJson -}}
{{- $pools = append $pools (dict "name" "" "config" $default "nodeSelector" dict "without" $without "values" $rest) -}}
{{- toJson (dict "pools" $pools) -}}
{{- end -}}

{{/* The name of the configuration of nodes in no pool, by the rules of NVIDIA's chart. */}}
{{- define "tandem.defaultConfig" -}}
{{- $c := .Values.config -}}
{{- $fallbacks := $c.fallbackStrategies | default list -}}
{{- if $c.default -}}
{{- $c.default -}}
{{- else if and (has "named" $fallbacks) (or $c.name (hasKey (default dict $c.map) "default")) -}}
default
{{- else if and (has "single" $fallbacks) (eq (len (default dict $c.map)) 1) (not .Values.pools) -}}
{{- keys (default dict $c.map) | first -}}
{{- end -}}
{{- end -}}

{{/* The values of a pool: a key of the pool replaces the chart's, and of a section only the keys that the pool has. */}}
{{- define "tandem.merged" -}}
{{- $merged := omit (deepCopy .base) "pools" "config" -}}
{{- range $key, $value := .pool -}}
{{- if has $key (list "name" "config" "nodeSelector") -}}
{{- else if has $key (list "image" "mig" "mps" "cdi" "owners" "nodeLabels" "selinux") -}}
{{- range $k, $v := $value -}}{{- $_ := set (index $merged $key) $k $v -}}{{- end -}}
{{- else -}}
{{- $_ := set $merged $key $value -}}
{{- end -}}
{{- end -}}
{{- toJson $merged -}}
{{- end -}}

{{/* The configuration of a pool as a mapping, {} where the chart can't read it (a ConfigMap of your own). */}}
{{- define "tandem.parsed" -}}
{{- $text := index (default dict .root.Values.config.map) (default "-" .pool.config) -}}
{{- if kindIs "string" $text -}}
{{- $text | fromYaml | toJson -}}
{{- else -}}
{{- toJson (default dict $text) -}}
{{- end -}}
{{- end -}}

{{/*
What follows from the values and the configuration of a pool, as JSON. A value takes precedence over the configuration, because the agent
reads a variable before its file.
*/}}
{{- define "tandem.derived" -}}
{{- $v := .pool.values -}}
{{- $config := include "tandem.parsed" . | fromJson -}}
{{- $flags := default dict $config.flags -}}
{{- $plugin := default dict $flags.plugin -}}
{{- $rules := default list (default dict $config.policy).rules -}}
{{- $migStrategy := default (default "none" $flags.migStrategy) $v.migStrategy -}}
{{- $rulesHaveMIG := false -}}
{{- $mps := or $flags.mpsRoot (default dict (default dict $config.sharing).mps).resources | not | not -}}
{{- range $rules -}}
{{- if eq (default "" .use) "mps" -}}{{- $mps = true -}}{{- end -}}
{{- if not (has (default "none" .migStrategy) (list "none" "")) -}}{{- $rulesHaveMIG = true -}}{{- end -}}
{{- end -}}
{{- $mig := or (ne $migStrategy "none") $rulesHaveMIG -}}
{{- $strategy := $v.deviceListStrategy -}}
{{- if kindIs "invalid" $strategy -}}
{{- $strategy = ternary "cdi-cri" (ternary "" "auto" (hasKey $plugin "deviceListStrategy")) $v.cdi.privileged -}}
{{- end -}}
{{- $check := default "off" $v.reservationCheck -}}
{{- $d := dict "mig" (ternary $mig $v.mig.enabled (kindIs "invalid" $v.mig.enabled)) -}}
{{- $_ := set $d "mps" (ternary $mps $v.mps.enabled (kindIs "invalid" $v.mps.enabled)) -}}
{{- $_ := set $d "deviceListStrategy" $strategy -}}
{{- $_ := set $d "dra" (eq (default (default "device-plugin" $config.api) $v.api) "dra") -}}
{{- $_ := set $d "kubeletRoot" (trimSuffix "/" $v.kubeletRoot) -}}
{{- $_ := set $d "driverRoot" (default "/" $v.nvidiaDriverRoot | trimSuffix "/" | default "/") -}}
{{- $_ := set $d "hostPID" (or (ne $check "off") $v.owners.enabled) -}}
{{- $_ := set $d "selinux" (or $v.selinux.enabled .root.Values.openshift.enabled) -}}
{{- $passDeviceSpecs := $v.passDeviceSpecs -}}
{{- if kindIs "invalid" $passDeviceSpecs -}}{{- $passDeviceSpecs = $v.compatWithCPUManager -}}{{- end -}}
{{- $_ := set $d "passDeviceSpecs" $passDeviceSpecs -}}
{{- $update := default dict $v.updateStrategy -}}
{{- if ne (default "" $update.type) "OnDelete" -}}
{{- $rolling := default dict $update.rollingUpdate -}}
{{- $_ := set $d "surge" (not (has (toString (default 0 $rolling.maxSurge)) (list "0" "0%"))) -}}
{{- $_ := set $d "unavailable" (not (has (toString $rolling.maxUnavailable) (list "0" "0%"))) -}}{{/* without a value it is 1 */}}
{{- end -}}
{{- toJson $d -}}
{{- end -}}

{{/*
The affinity of a pool: the given one, without the nodes of earlier pools. Node selector terms are alternatives, and all requirements of
one must hold: "not a=1 and b=2" are two alternatives, with which each term so far is combined.
*/}}
{{- define "tandem.affinity" -}}
{{- $affinity := deepCopy (default dict .pool.values.affinity) -}}
{{- $node := default dict $affinity.nodeAffinity -}}
{{- $required := default dict $node.requiredDuringSchedulingIgnoredDuringExecution -}}
{{- $terms := default (list dict) $required.nodeSelectorTerms -}}
{{- $own := .pool.nodeSelector -}}
{{- range $selector := .pool.without -}}
{{- $apart := false -}}
{{- range $key, $value := $selector -}}
{{- if and (hasKey $own $key) (ne (index $own $key) $value) -}}{{- $apart = true -}}{{- end -}}
{{- end -}}
{{- if not $apart -}}
{{- $next := list -}}
{{- range $term := $terms -}}
{{- range $key, $value := $selector -}}
{{- $not := dict "key" $key "operator" "NotIn" "values" (list $value) -}}
{{- $copy := deepCopy $term -}}
{{- $next = append $next (set $copy "matchExpressions" (append (default list $term.matchExpressions) $not)) -}}
{{- end -}}
{{- end -}}
{{- $terms = $next -}}
{{- $_ := set $required "nodeSelectorTerms" $terms -}}
{{- $_ := set $node "requiredDuringSchedulingIgnoredDuringExecution" $required -}}
{{- $_ := set $affinity "nodeAffinity" $node -}}
{{- end -}}
{{- end -}}
{{- if $affinity -}}{{- toYaml $affinity -}}{{- end -}}
{{- end -}}
