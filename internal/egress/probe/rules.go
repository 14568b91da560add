package probe

// Rule names as audit records show them. They are not taken from package
// egress, because the table must not change together with the code that it
// checks.
const (
	ruleUnspecified   = "always.unspecified"
	ruleLoopback      = "always.loopback"
	rulePrivate       = "always.private"
	ruleCGNAT         = "always.cgnat"
	ruleTailnet       = "always.tailnet"
	ruleLinkLocal     = "always.linklocal"
	ruleMetadata      = "always.metadata"
	ruleULA           = "always.ula"
	ruleSiteLocal     = "always.sitelocal"
	ruleMulticast     = "always.multicast"
	ruleBroadcast     = "always.broadcast"
	ruleDocumentation = "always.documentation"
	ruleBenchmark     = "always.benchmark"
	ruleTransition    = "always.transition"
	ruleReserved      = "always.reserved"
	ruleProtocol      = "always.protocol"
	ruleRebinding     = "always.rebinding"
	ruleController    = "always.controller"
	ruleForeignDNS    = "always.dns"

	ruleOff          = "mode.off"
	ruleAllowlist    = "mode.allowlist"
	rulePorts        = "ports"
	ruleNameMismatch = "name.mismatch"
	ruleNameMissing  = "name.missing"
	ruleNameUnread   = "name.quic"
	layerPrefix      = "layer."
	denyPrefix       = "deny:"
)
