{{/*
The DaemonSets of the chart, as JSON {"pools": [{name, config, byLabel, nodeSelector, without, values}]}: each pool, and the nodes of no pool
last, with an empty name. "without" are the node selectors of the pools whose nodes it does not have: the first pool that matches applies.
byLabel: the agents choose their configuration by the label of their node, and config is that of a node without it, where the chart knows that.
*/}}
{{- define "tandem.pools" -}}
{{- $root := . -}}
{{- $default := include "tandem.defaultConfig" . -}}
{{- $given := .Values.pools | default list -}}
{{- $others := without (keys (include "tandem.configMap" . | fromJson)) $default -}}
{{- $byLabel := and (not $given) (or .Values.config.name $others) | not | not -}}
{{- $pools := list -}}
{{- $without := list -}}
{{- range $given -}}
{{- $values := include "tandem.merged" (dict "base" $root.Values "pool" .) | fromJson -}}
{{- $pools = append $pools (dict "name" .name "config" (default $default .config) "byLabel" false "nodeSelector" .nodeSelector "without" $without "values" $values) -}}
{{- $without = append $without .nodeSelector -}}
{{- end -}}
{{- $rest := include "tandem.merged" (dict "base" $root.Values "pool" dict) | fromJson -}}
{{- $pools = append $pools (dict "name" "" "config" $default "byLabel" $byLabel "nodeSelector" dict "without" $without "values" $rest) -}}
{{- toJson (dict "pools" $pools) -}}
{{- end -}}

{{/* The name of the configuration of nodes in no pool, by the rules of NVIDIA's chart. */}}
{{- define "tandem.defaultConfig" -}}
{{- $c := .Values.config -}}
{{- $map := include "tandem.configMap" . | fromJson -}}
{{- $fallbacks := $c.fallbackStrategies | default list -}}
{{- if $c.default -}}
{{- $c.default -}}
{{- else if and (has "named" $fallbacks) (or $c.name (hasKey $map "default")) -}}
default
{{- else if and (has "single" $fallbacks) (eq (len $map) 1) (not .Values.pools) -}}
{{- keys $map | first -}}
{{- end -}}
{{- end -}}

{{/*
The configurations by name, as JSON: those of config.map, and without any and with prove.enabled or reset.enabled the one of the component prove or
reset, with both that of both.
*/}}
{{- define "tandem.configMap" -}}
{{- $map := default dict .Values.config.map -}}
{{- if or $map .Values.config.name -}}
{{- else if and .Values.prove.enabled .Values.reset.enabled -}}
{{- $map = dict "default" (merge (.Files.Get "files/prove.yaml" | fromYaml) (.Files.Get "files/reset.yaml" | fromYaml)) -}}
{{- else if .Values.prove.enabled -}}
{{- $map = dict "default" (.Files.Get "files/prove.yaml") -}}
{{- else if .Values.reset.enabled -}}
{{- $map = dict "default" (.Files.Get "files/reset.yaml") -}}
{{- end -}}
{{- toJson $map -}}
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

{{/*
The configurations that nodes of a pool may have, as JSON {"configs": [{name, config}]}, each as a mapping: {} where the chart can't read it (a
ConfigMap of your own), or there is none.
*/}}
{{- define "tandem.configs" -}}
{{- $map := include "tandem.configMap" .root | fromJson -}}
{{- $names := list .pool.config -}}
{{- if and .pool.byLabel $map -}}{{- $names = concat (ternary (list "") list (eq .pool.config "")) (keys $map | sortAlpha) -}}{{- end -}}
{{- $all := list -}}
{{- range $name := $names -}}
{{- $config := index $map (default "-" $name) -}}
{{- if kindIs "string" $config -}}{{- $config = $config | fromYaml -}}{{- end -}}
{{- $all = append $all (dict "name" $name "config" (default dict $config)) -}}
{{- end -}}
{{- toJson (dict "configs" $all) -}}
{{- end -}}

{{/*
What follows from the values and the configurations of a pool, as JSON. A value takes precedence over a configuration, because the agent
reads a variable before its file. A pod has what any of the configurations needs that its node may have.
*/}}
{{- define "tandem.derived" -}}
{{- $v := .pool.values -}}
{{- $mig := false -}}
{{- $mps := false -}}
{{- $dra := false -}}
{{- $prove := false -}}
{{- $reset := false -}}
{{- $limits := false -}}
{{- $hasStrategy := false -}}
{{- range (include "tandem.configs" . | fromJson).configs -}}
{{- $flags := default dict .config.flags -}}
{{- $mig = or $mig (ne (default (default "none" $flags.migStrategy) $v.migStrategy) "none") -}}
{{- $mps = or $mps $flags.mpsRoot (default dict (default dict .config.sharing).mps).resources | not | not -}}
{{- range default list (default dict .config.policy).rules -}}
{{- if eq (default "" .use) "mps" -}}{{- $mps = true -}}{{- end -}}
{{- if not (has (default "none" .migStrategy) (list "none" "")) -}}{{- $mig = true -}}{{- end -}}
{{- end -}}
{{- $dra = or $dra (eq (default (default "device-plugin" .config.api) $v.api) "dra") -}}
{{- $prove = or $prove .config.prove | not | not -}}
{{- $reset = or $reset (has (default dict .config.reset).mode (list "report" "act")) -}}
{{- $limits = or $limits (eq (toString (default dict .config.memoryLimits).experimental) "true") -}}
{{- $hasStrategy = or $hasStrategy (hasKey (default dict $flags.plugin) "deviceListStrategy") -}}
{{- end -}}
{{- $strategy := $v.deviceListStrategy -}}
{{- if kindIs "invalid" $strategy -}}
{{- $strategy = ternary "cdi-cri" (ternary "" "auto" $hasStrategy) $v.cdi.privileged -}}
{{- end -}}
{{- $gfd := default dict .root.Values.gfd -}}
{{- $labels := "" -}}
{{- if or $v.nodeLabels.enabled $gfd.enabled -}}
{{- $labels = ternary "object" "file" (ternary $v.nodeLabels.nodeFeatureAPI (not $v.nodeLabels.enabled) (kindIs "bool" $v.nodeLabels.nodeFeatureAPI)) -}}
{{- end -}}
{{- $check := default "off" $v.reservationCheck -}}
{{- $d := dict "mig" (ternary $mig $v.mig.enabled (kindIs "invalid" $v.mig.enabled)) -}}
{{- $_ := set $d "mps" (ternary $mps $v.mps.enabled (kindIs "invalid" $v.mps.enabled)) -}}
{{- $_ := set $d "mpsDaemon" (and $d.mps (ternary (not $v.cdi.privileged) $v.mps.daemon (kindIs "invalid" $v.mps.daemon))) -}}
{{- $_ := set $d "deviceListStrategy" $strategy -}}
{{- $_ := set $d "dra" $dra -}}
{{- $_ := set $d "labels" $labels -}}
{{- $_ := set $d "noTimestamp" (or $v.nodeLabels.noTimestamp $gfd.noTimestamp .root.Values.noTimestamp | not | not) -}}
{{- $_ := set $d "readsNode" (or .pool.byLabel (eq .root.Values.gpuOperator.onDriverUpgrade "quiesce")) -}}
{{- $_ := set $d "token" (or $dra $d.readsNode (eq $labels "object") .root.Values.handOver.enabled) -}}
{{- $_ := set $d "kubeletRoot" (trimSuffix "/" $v.kubeletRoot) -}}
{{- $_ := set $d "driverRoot" (default "/" $v.nvidiaDriverRoot | trimSuffix "/" | default "/") -}}
{{- $_ := set $d "prove" (ternary $prove $v.prove.enabled (kindIs "invalid" $v.prove.enabled)) -}}
{{- $_ := set $d "reset" (ternary $reset $v.reset.enabled (kindIs "invalid" $v.reset.enabled)) -}}
{{- $_ := set $d "limits" (ternary $limits $v.memoryLimits.enabled (kindIs "invalid" $v.memoryLimits.enabled)) -}}
{{- $_ := set $d "readsLimits" (or $d.limits $v.memoryLimits.read) -}}
{{- $_ := set $d "hostPID" (or (ne $check "off") $v.owners.enabled $d.prove $d.reset $d.readsLimits) -}}
{{- $resources := deepCopy (default dict $v.resources) -}}
{{- if and $d.prove $v.prove.memory (default dict $resources.limits).memory -}}{{- $_ := set $resources.limits "memory" $v.prove.memory -}}{{- end -}}
{{- $_ := set $d "resources" $resources -}}
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
Node selector terms for the nodes that no selector matches, as JSON {"terms": [[requirement, ...], ...]}: {selectors, count}. Terms are
alternatives, and all requirements of one must hold. "Not a=1 and b=2" is two terms, and all combinations of those of several selectors would be
as many as 2 to their power. So nodes are told apart by one label after the other: for each value of a label that selectors have, one branch with
what is left of these. count.terms counts what was found so far: above tandem.maxTerms, which validation.yaml refuses, nothing more is added.
*/}}
{{- define "tandem.outside" -}}
{{- $count := .count -}}
{{- $all := list -}}
{{- $left := list -}}
{{- range $selector := .selectors -}}
{{- range $key, $value := $selector -}}
{{- if eq (len $selector) 1 -}}{{- $all = append $all (dict "key" $key "operator" "NotIn" "values" (list $value)) -}}{{- end -}}
{{- end -}}
{{- if gt (len .) 1 -}}{{- $left = append $left . -}}{{- end -}}
{{- end -}}
{{- $branches := list -}}
{{- if gt $count.terms (include "tandem.maxTerms" . | int) -}}
{{- else if not $left -}}
{{- $branches = list list -}}
{{- else if eq (len $left) 1 -}}
{{- range $key, $value := first $left -}}{{- $branches = append $branches (list (dict "key" $key "operator" "NotIn" "values" (list $value))) -}}{{- end -}}
{{- else -}}
{{- $key := include "tandem.commonKey" $left -}}
{{- $without := list -}}
{{- $with := dict -}}
{{- range $selector := $left -}}
{{- if hasKey . $key -}}{{- $_ := set $with (index . $key) (append (default list (index $with (index . $key))) (omit . $key)) -}}
{{- else -}}{{- $without = append $without . -}}{{- end -}}
{{- end -}}
{{- $values := keys $with | sortAlpha -}}
{{- range (include "tandem.outside" (dict "selectors" $without "count" $count) | fromJson).terms -}}
{{- $branches = append $branches (prepend . (dict "key" $key "operator" "NotIn" "values" $values)) -}}
{{- end -}}
{{- range $value := $values -}}
{{- range (include "tandem.outside" (dict "selectors" (concat (index $with $value) $without) "count" $count) | fromJson).terms -}}
{{- $branches = append $branches (prepend . (dict "key" $key "operator" "In" "values" (list $value))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $terms := list -}}
{{- range $branches -}}{{- $terms = append $terms (concat $all . | default list) -}}{{- end -}}
{{- if le (len $left) 1 -}}{{- $_ := set $count "terms" (add $count.terms (len $terms)) -}}{{- end -}}
{{- toJson (dict "terms" $terms) -}}
{{- end -}}

{{/* The label that most selectors have; of those the one with the fewest values. */}}
{{- define "tandem.commonKey" -}}
{{- $values := dict -}}
{{- range . -}}
{{- range $key, $value := . -}}{{- $_ := set $values $key (append (default list (index $values $key)) $value) -}}{{- end -}}
{{- end -}}
{{- $best := "" -}}
{{- range $key := keys $values | sortAlpha -}}
{{- $of := index $values $key -}}
{{- $than := default list (index $values $best) -}}
{{- if or (gt (len $of) (len $than)) (and (eq (len $of) (len $than)) (lt (len (uniq $of)) (len (uniq $than)))) -}}{{- $best = $key -}}{{- end -}}
{{- end -}}
{{- $best -}}
{{- end -}}

{{/* The most node selector terms of a DaemonSet: about 60 kB. etcd takes 1.5 MB, and Helm keeps all objects of a release in one. */}}
{{- define "tandem.maxTerms" -}}100{{- end -}}

{{/*
The node selector terms of a pool, as JSON {"terms": [...]}: those of the given affinity, on nodes with GPUs only if that is set, without the nodes of
earlier pools.
*/}}
{{- define "tandem.terms" -}}
{{- $own := .pool.nodeSelector -}}
{{- $selectors := list -}}
{{- range $selector := .pool.without -}}
{{- $apart := false -}}
{{- range $key, $value := $selector -}}
{{- if and (hasKey $own $key) (ne (index $own $key) $value) -}}{{- $apart = true -}}{{- end -}}
{{- end -}}
{{- if not $apart -}}{{- $selectors = append $selectors $selector -}}{{- end -}}
{{- end -}}
{{- $required := default dict (default dict (default dict .pool.values.affinity).nodeAffinity).requiredDuringSchedulingIgnoredDuringExecution -}}
{{- $terms := default list $required.nodeSelectorTerms -}}
{{- if .pool.values.gpuNodesOnly -}}
{{- $given := default (list dict) $terms -}}
{{- $terms = list -}}
{{- range $term := $given -}}
{{- range $label := list "nvidia.com/gpu.present" "feature.node.kubernetes.io/pci-10de.present" "feature.node.kubernetes.io/pci-0302_10de.present" "feature.node.kubernetes.io/pci-0300_10de.present" -}}
{{- $requirement := dict "key" $label "operator" "In" "values" (list "true") -}}
{{- $terms = append $terms (merge (dict "matchExpressions" (append (default list $term.matchExpressions) $requirement)) $term) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $selectors -}}
{{- $outside := (include "tandem.outside" (dict "selectors" $selectors "count" (dict "terms" 0)) | fromJson).terms -}}
{{- $given := default (list dict) $terms -}}
{{- $terms = list -}}
{{- range $term := $given -}}
{{- range $requirements := $outside -}}
{{- $terms = append $terms (merge (dict "matchExpressions" (concat (default list $term.matchExpressions) $requirements)) $term) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson (dict "terms" $terms) -}}
{{- end -}}

{{/* The affinity of a pool: the given one, with tandem.terms. */}}
{{- define "tandem.affinity" -}}
{{- $affinity := deepCopy (default dict .pool.values.affinity) -}}
{{- with (include "tandem.terms" . | fromJson).terms -}}
{{- $node := default dict $affinity.nodeAffinity -}}
{{- $_ := set $node "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" .) -}}
{{- $_ := set $affinity "nodeAffinity" $node -}}
{{- end -}}
{{- if $affinity -}}{{- toYaml $affinity -}}{{- end -}}
{{- end -}}
