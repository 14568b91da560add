package api

// SecretVault lists who can open secrets bundles.
type SecretVault struct {
	PublicKey  string   `json:"public_key" doc:"Public key of the daemon"`
	Recipients []string `json:"recipients" doc:"Other public keys that can open the bundles"`
	Bundles    []string `json:"bundles,omitempty" doc:"Re-encrypted bundles"`
	Kept       []string `json:"kept,omitempty" doc:"Old public keys that are kept because sops bundles use them"`
}

// SecretRotate is the request for a new key.
type SecretRotate struct {
	Add    []string `json:"add,omitempty" doc:"Additional recipients: age1…, ssh-ed25519 … or ssh-rsa …"`
	Remove []string `json:"remove,omitempty" doc:"Recipients that can no longer open the bundles"`
}

// SecretCreate is the request for an empty bundle.
type SecretCreate struct {
	Name string `json:"name"`
}

// SecretBundle is a secrets bundle in a list.
type SecretBundle struct {
	Name    string   `json:"name"`
	Format  string   `json:"format" enum:"age,sops" doc:"sops: managed with the program sops"`
	Keys    []string `json:"keys" doc:"Names of the values, without the values"`
	Problem string   `json:"problem,omitempty" doc:"Why it cannot be read"`
}

// SecretShow is the request for the entries of a bundle.
type SecretShow struct {
	Reveal bool `json:"reveal,omitempty" doc:"Include values"`
}

// SecretEntry is an entry of a bundle.
type SecretEntry struct {
	Key       string `json:"key"`
	Reference string `json:"reference,omitempty" doc:"Reference that is resolved at delivery; empty for a literal value"`
	Value     string `json:"value,omitempty" doc:"Literal value, with reveal"`
}

// SecretText is the decrypted text of a bundle.
type SecretText struct {
	Text    string `json:"text" doc:"YAML"`
	Version string `json:"version" doc:"Version to send when replacing the text"`
}

// SecretValidate is the request to check bundles.
type SecretValidate struct {
	Bundle  string `json:"bundle,omitempty" doc:"Empty means all"`
	Resolve bool   `json:"resolve,omitempty" doc:"Resolve every reference and discard the value"`
}

// SecretCheck is the result of checking bundles.
type SecretCheck struct {
	Checked  []string        `json:"checked" doc:"Bundles"`
	Findings []SecretFinding `json:"findings" doc:"Empty if there are no problems"`
}

// SecretFinding is a problem of a bundle.
type SecretFinding struct {
	Bundle  string `json:"bundle,omitempty" doc:"Empty for the directory or the key"`
	Key     string `json:"key,omitempty"`
	Problem string `json:"problem"`
	Hint    string `json:"hint,omitempty"`
}
