acl {
  enabled = true
}
